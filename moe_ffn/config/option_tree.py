"""The options of a config as a tree: every option by its dotted path, with its value and its meaning."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from moe_ffn.config.base import Config, TaggedConfig, help_texts
from moe_ffn.config.errors import ConfigError, explain

REQUIRED = "(required)"
"""The value of an option that has none yet, and no default."""


@dataclass(frozen=True)
class Option:
    """One key of a config, or the config itself, whose path is empty."""

    path: str
    """Dotted, `model.ffn.router.k`."""
    annotation: Any
    value: Any
    """The value in YAML; for a section a mapping, or the name of its type."""
    meaning: str

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def declared(self) -> type[Config] | None:
        """The class that its value may be of, of a family the base; None for a plain value."""
        is_union = get_origin(self.annotation) in (Union, UnionType)
        for candidate in get_args(self.annotation) if is_union else [self.annotation]:
            if isinstance(candidate, type) and issubclass(candidate, Config):
                return candidate
        return None

    @property
    def family(self) -> type[TaggedConfig] | None:
        """The family whose member this is; None where there is nothing to choose."""
        found = self.declared
        if found is None or not issubclass(found, TaggedConfig) or not found.is_family_root():
            return None
        return found

    @property
    def type(self) -> Any:
        """The `type` that a section names."""
        return self.value.get("type") if isinstance(self.value, Mapping) else self.value

    @property
    def is_from_outside(self) -> bool:
        """True for a custom class, whose code is not run for this."""
        return self.family is not None and isinstance(self.type, str) and ":" in self.type

    @property
    def config(self) -> type[Config] | None:
        """The class that its value is of; None for a plain value and for null.

        Raises:
            ConfigError: the value names a type that there is not.
        """
        if self.value == REQUIRED:
            return None
        value = {"type": self.value} if isinstance(self.value, str) else self.value
        if self.declared is None or self.is_from_outside or not isinstance(value, Mapping):
            return None
        try:
            return self.declared.class_for(value)
        except ValidationError as error:
            lines = (f"{self.path}.{line}" for line in explain(error))
            raise ConfigError("\n".join(lines)) from error

    def children(self) -> list[Option]:
        """The options of a section, in order; none of a plain value, nor of a type that there is not."""
        if self.is_from_outside:
            text = "Its own options are not listed, since --help runs nobody's code; --print-config has them."
            return [Option(self._below("type"), None, self.type, f"{self.meaning} {text}".lstrip())]
        try:
            config = self.config
        except ConfigError:
            return []
        return [] if config is None else self.options_of(config)

    def options_of(self, config: type[Config]) -> list[Option]:
        """The options that stand below this one where its value is of `config`."""
        fields, meanings = [], help_texts(config)
        for name, field in config.model_fields.items():
            value = self.value.get(name) if isinstance(self.value, Mapping) else None
            if value is None:
                value = REQUIRED if field.is_required() else field.get_default()
            value = value.to_dict() if isinstance(value, Config) else value
            meaning = " ".join(meanings[name].split())
            if name == "type" and issubclass(config, TaggedConfig):
                known = ", ".join([*config.members, "my_file.py:ClassName"])
                meaning = f"{first_sentence(config)} One of: {known}.".lstrip()
            elif get_origin(field.annotation) is Literal:
                meaning += f" One of: {', '.join(map(str, get_args(field.annotation)))}."
            fields.append(Option(self._below(name), field.annotation, value, meaning))
        return fields

    def switched_on(self) -> Option:
        """A section that is null as it would be with its defaults; others as they are."""
        is_off = self.value is None and self.family is None and self.declared is not None
        return replace(self, value={}) if is_off else self

    def everything(self) -> Iterator[Option]:
        """Every option and section below this one."""
        for child in self.children():
            yield child
            yield from child.everything()

    def leaves(self) -> Iterator[Option]:
        """Every option at and below this one that is no section.

        Raises:
            ConfigError: a section names a type that there is not.
        """
        for option in (self, *self.everything()):
            if not option.children() and option.config is None:
                yield option

    def find(self, path: str) -> Option | None:
        """The option or section below this one that has this path; sections that are null are gone into."""
        option: Option | None = self
        for name in path.split("."):
            below = [] if option is None else option.switched_on().children()
            option = next((child for child in below if child.name == name), None)
        return option

    def _below(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def option_tree(root: type[Config], options: Mapping[str, Any]) -> Option:
    """The options of `root` with the values in `options`."""
    return Option("", root, options, first_sentence(root))


def members_of(family: type[TaggedConfig]) -> dict[type[TaggedConfig], list[str]]:
    """The classes of a family, each with the types that name it."""
    members: dict[type[TaggedConfig], list[str]] = {}
    for name, member in family.members.items():
        members.setdefault(member, []).append(name)
    return members


def first_sentence(config: type[Config]) -> str:
    """First line of a config's docstring; empty without one (`python -OO`)."""
    lines = (config.__doc__ or "").strip().splitlines()
    return f"{lines[0].rstrip('.')}." if lines else ""


def show_value(value: Any) -> str:
    """A value as YAML has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- names that are no option


ALSO_CALLED = {
    "bs": "batch_size",
    "check_val_every_n_epoch": "validate_every_n_steps",
    "clip": "gradient_clip_val",
    "dataset": "corpus",
    "default_root_dir": "output_dir",
    "device": "accelerator",
    "dtype": "precision",
    "epochs": "max_steps",
    "experts": "num_experts",
    "fast_dev_run": "max_steps",
    "gpus": "devices",
    "grad_accum": "accumulate_grad_batches",
    "heads": "num_heads",
    "hidden_size": "d_model",
    "iters": "max_steps",
    "layers": "num_layers",
    "limit_train_batches": "max_steps",
    "limit_val_batches": "validation_tokens",
    "log_every_n_steps": "every_n_steps",
    "lr": "learning_rate",
    "max_epochs": "max_steps",
    "min_epochs": "max_steps",
    "output": "output_dir",
    "steps": "max_steps",
    "top_k": "k",
    "val_check_interval": "validate_every_n_steps",
    "warmup": "warmup_fraction",
    "wd": "weight_decay",
}
"""Name of an option in other programs and papers -> last part of its path here."""

NOT_OF_THE_TRAINER = {
    "barebones": "the loggers and checkpoints of a run are its result",
    "callbacks": "they are objects; write a program with moe_ffn.runs.assemble",
    "enable_checkpointing": "the best and the last weights are always kept",
    "enable_model_summary": "the model table stands for it",
    "enable_progress_bar": "the progress display stands for it",
    "logger": "use logging",
    "num_sanity_val_steps": "the first validation comes soon enough",
    "overfit_batches": "give data.corpus a small text",
    "plugins": "they are objects; write a program with moe_ffn.runs.assemble",
    "sync_batchnorm": "no block has a BatchNorm; one of yours may hold torch.nn.SyncBatchNorm",
    "use_distributed_sampler": "every rank takes its part of each batch already",
}
"""Arguments of `lightning.Trainer` that have no option here, and why."""

MAX_NAMED = 3
"""If more options than this might be meant, only the first are named."""


def explain_unknown(path: str, message: str, tree: Option) -> str:
    """The message about a path that is no option of `tree`.

    Args:
        message: what its own section says of it, with or without a name like it.
    """
    if found := _same_name(path, tree.everything()):
        return f"unknown{_did_you_mean(found)}"
    if why := NOT_OF_THE_TRAINER.get(path.removeprefix("trainer.")):
        return f"is set by the program itself; {why}"
    if "did you mean" in message:
        return message
    if of_another_type := _of_another_type(path, tree):
        return of_another_type
    near = nearest_options(path, tree)
    return f"unknown{near}" if near else message


def nearest_options(typed: str, tree: Option) -> str:
    """`"; did you mean 'optimizer.learning_rate'?"` for `trainer.learning_rate`, for `lr` or `learn_rate`.

    The empty string where no option is called so, or nearly so.
    """
    here = list(tree.everything())
    above, _, name = typed.replace("-", "_").rpartition(".")
    near = difflib.get_close_matches(name, {option.name: None for option in here}, n=1)
    return _did_you_mean(
        _same_name(typed, here) or (_same_name(f"{above}.{near[0]}", here) if near else [])
    )


def _did_you_mean(paths: Sequence[str]) -> str:
    return f"; did you mean {_any_of(paths)}?" if paths else ""


def _any_of(names: Sequence[str]) -> str:
    return " or ".join(f"'{name}'" for name in names[:MAX_NAMED])


def _of_another_type(typed: str, tree: Option) -> str:
    """The types of its section that know the last part of this path, or one like it; empty without one."""
    path, _, name = typed.rpartition(".")
    section = tree.find(path) if path else None
    if section is None or section.family is None:
        return ""
    members = section.family.members
    keys = {type_: list(member.known_keys()) for type_, member in members.items()}
    types = [type_ for type_, known in keys.items() if name in known]
    here = f"unknown with {path}.type '{section.type}'"
    if types:
        here += f"; it belongs to type {_any_of(types)}: add --{path}.type {types[0]}"
    others = dict.fromkeys(chain(*keys.values()))
    if types:  # `path` may stand for `paths`, but `paths` is no slip for `path`
        others = [key for key in others if key.startswith(name) and key != name]
    near = difflib.get_close_matches(name, others, n=1, cutoff=0.8)
    if not near:
        return here if types else ""
    types = [type_ for type_, known in keys.items() if near[0] in known]
    return f"{here}; did you mean '{path}.{near[0]}' of type {_any_of(types)}?"


def _same_name(typed: str, options: Iterable[Option]) -> list[str]:
    """The paths that end as `typed` does: those that have most of it, and of them the shortest first."""
    *above, name = typed.replace("-", "_").split(".")
    common: dict[str, int] = {}
    for option in options:
        if option.name in (name, ALSO_CALLED.get(name)):
            parts = option.path.split(".")[:-1]
            same = [one == other for one, other in zip(above[::-1], parts[::-1], strict=False)]
            common[option.path] = [*same, False].index(False)
    most = max(common.values(), default=0)
    return sorted((p for p in common if common[p] == most), key=lambda path: path.count("."))


def flatten(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """`{"model": {"ffn": 1}}` as `{"model.ffn": 1}`; without sections that are empty."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat
