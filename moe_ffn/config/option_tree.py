"""Options by dotted path: the tree of a config with help texts, differences, and merged mappings."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from moe_ffn.config.base import Config, TaggedConfig, help_texts
from moe_ffn.config.errors import ConfigError, any_of, did_you_mean, explain, nearest, suggest

REQUIRED = "(required)"
"""Value shown for an option that has neither a value nor a default."""


@dataclass(frozen=True)
class Option:
    """Option or section of a config; the root is a section with an empty path."""

    path: str
    """Dotted path, `model.ffn.router.k`."""
    annotation: Any
    value: Any
    """Value as in YAML; for a section a mapping, or the name of its type."""
    meaning: str
    """Help text."""

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def declared(self) -> type[Config] | None:
        """Config class in the annotation, perhaps the root of a family; None for a plain value."""
        is_union = get_origin(self.annotation) in (Union, UnionType)
        for candidate in get_args(self.annotation) if is_union else [self.annotation]:
            if isinstance(candidate, type) and issubclass(candidate, Config):
                return candidate
        return None

    @property
    def family(self) -> type[TaggedConfig] | None:
        """Root of the value's family; None for a fixed class or a plain value."""
        root = self.declared
        if root is None or not issubclass(root, TaggedConfig) or not root.is_family_root():
            return None
        return root

    @property
    def type(self) -> Any:
        """The `type` of a section."""
        return self.value.get("type") if isinstance(self.value, Mapping) else self.value

    @property
    def is_custom(self) -> bool:
        """True for a custom class, whose code `--help` does not run."""
        return self.family is not None and isinstance(self.type, str) and ":" in self.type

    @property
    def config(self) -> type[Config] | None:
        """Config class of the value; None for a plain value and null, ConfigError for an unknown type."""
        if self.value == REQUIRED:
            return None
        value = {"type": self.value} if isinstance(self.value, str) else self.value
        if self.declared is None or self.is_custom or not isinstance(value, Mapping):
            return None
        try:
            return self.declared.class_for(value)
        except ValidationError as error:
            lines = (f"{self.path}.{line}" for line in explain(error))
            raise ConfigError("\n".join(lines)) from error

    def children(self) -> list[Option]:
        """Return the options of a section in order; empty for a plain value or an unknown type."""
        if self.is_custom:
            text = "Its options are not listed, since --help runs no custom code; --print-config shows them."
            path = self._path_of("type")
            return [Option(path, None, self.type, f"{self.meaning} {text}".lstrip())]
        try:
            config = self.config
        except ConfigError:
            return []
        return [] if config is None else self.options_of(config)

    def options_of(self, config: type[Config]) -> list[Option]:
        """Return the options of this section for the class `config`."""
        options, meanings = [], help_texts(config)
        for name, field in config.model_fields.items():
            if name in config.rejected_options:
                continue
            value = self.value.get(name) if isinstance(self.value, Mapping) else None
            if value is None:
                value = (
                    REQUIRED
                    if field.is_required()
                    else field.get_default(call_default_factory=True)
                )
            value = value.to_dict() if isinstance(value, Config) else value
            meaning = " ".join(meanings[name].split())
            if name == "type" and issubclass(config, TaggedConfig):
                known = ", ".join([*config.members, "my_file.py:ClassName"])
                meaning = f"{first_sentence(config)} One of: {known}.".lstrip()
            elif get_origin(field.annotation) is Literal:
                meaning += f" One of: {', '.join(map(str, get_args(field.annotation)))}."
            options.append(Option(self._path_of(name), field.annotation, value, meaning))
        return options

    def switched_on(self) -> Option:
        """Return a null section with its defaults; any other option unchanged."""
        is_off = self.value is None and self.family is None and self.declared is not None
        return replace(self, value={}) if is_off else self

    def descendants(self) -> Iterator[Option]:
        """Yield all options and sections below this one."""
        for child in self.children():
            yield child
            yield from child.descendants()

    def leaves(self) -> Iterator[Option]:
        """Yield all options at and below this one, without sections; ConfigError for an unknown type."""
        for option in (self, *self.descendants()):
            if not option.children() and option.config is None:
                yield option

    def find(self, path: str) -> Option | None:
        """Return the option or section at a path below this one, also inside null sections."""
        option: Option | None = self
        for name in path.split("."):
            children = [] if option is None else option.switched_on().children()
            option = next((child for child in children if child.name == name), None)
        return option

    def _path_of(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name


def option_tree(root: type[Config], options: Mapping[str, Any]) -> Option:
    return Option("", root, options, first_sentence(root))


def members_of(family: type[TaggedConfig]) -> dict[type[TaggedConfig], list[str]]:
    """Return class -> its `type` names, for the members of a family."""
    members: dict[type[TaggedConfig], list[str]] = {}
    for name, member in family.members.items():
        members.setdefault(member, []).append(name)
    return members


def first_sentence(config: type[Config]) -> str:
    """Return the first line of a config's docstring as a sentence; empty without one (`python -OO`)."""
    lines = (config.__doc__ or "").strip().splitlines()
    return f"{lines[0].rstrip('.')}." if lines else ""


def show_value(value: Any) -> str:
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


# -- unknown names

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
"""Name of an option in other programs and papers -> its name here."""

_FIXED_TRAINER_ARGUMENTS = {
    "barebones": "the loggers and checkpoints of a run are its result",
    "callbacks": "a config cannot hold them; write a program with moe_ffn.runs.assemble",
    "enable_checkpointing": "the best and the last weights are always kept",
    "enable_model_summary": "the model table replaces it",
    "enable_progress_bar": "the progress display replaces it",
    "logger": "use the section logging",
    "num_sanity_val_steps": "a mistake in validation shows at the first validation",
    "overfit_batches": "to overfit, give data.corpus a small text",
    "plugins": "a config cannot hold them; write a program with moe_ffn.runs.assemble",
    "sync_batchnorm": "no block has a BatchNorm; a custom block may use torch.nn.SyncBatchNorm",
    "use_distributed_sampler": "each rank already reads its share of each batch",
}
"""Argument of `lightning.Trainer` that is not an option here -> reason or alternative."""


def explain_unknown(path: str, message: str, tree: Option) -> str:
    """Return the message about a path not in `tree`, given that of the section that rejected it."""
    if type_hint := _hint_for_type_name(path, tree):
        return type_hint
    if same_name := _same_name(path, tree):
        return f"unknown{suggest(same_name)}"
    if why := _FIXED_TRAINER_ARGUMENTS.get(path.removeprefix("trainer.")):
        return f"is set by the program itself; {why}"
    if other_type := _hint_for_other_type(path, tree):
        return other_type
    section, name = _section_of(path, tree)
    inside = section and nearest(name, (option.name for option in section.descendants()))
    if "did you mean" in message and (inside is None or f"'{inside}'" in message):
        return message
    near = nearest_options(path, tree)
    return f"unknown{near}" if near else message


def nearest_options(typed: str, tree: Option) -> str:
    """Return `"; did you mean 'optimizer.learning_rate'?"` for `lr`; empty if no option is similar."""
    near = nearest(typed.rpartition(".")[2], (option.name for option in tree.descendants()))
    return suggest(_same_name(typed, tree) or (_same_name(near, tree) if near else []))


def _hint_for_type_name(typed: str, tree: Option) -> str:
    """Explain that an unknown key is a type of its section: `{type: latent, width: 16, experts: {...}}`."""
    section, name = _section_of(typed, tree)
    if section is None or section.family is None or name not in section.family.members:
        return ""
    value = section.value.get(name) if isinstance(section.value, Mapping) else None
    given = "..." if isinstance(value, Mapping) else show_value(value)
    keys = [f"type: {name}"]
    for child in replace(section, value={"type": name}).children():
        if child.value == REQUIRED:
            keys.append(f"{child.name}: {given}")
        elif child.family is section.family:
            keys.append(f"{child.name}: {{...}}")
    return f"unknown; '{name}' is a type: --{section.path} '{{{', '.join(keys)}}}'"


def _section_of(typed: str, tree: Option) -> tuple[Option | None, str]:
    """Split a path into its section (None for the root or an unknown section) and the key in the section."""
    path, _, name = typed.rpartition(".")
    return (tree.find(path) if path else None), name


def _hint_for_other_type(typed: str, tree: Option) -> str:
    """Name the types of the section that have this option; empty if there is none."""
    section, name = _section_of(typed, tree)
    if section is None or section.family is None:
        return ""
    path, members = section.path, section.family.members
    types = [
        tag
        for tag, member in members.items()
        if name in member.known_keys() and name not in member.rejected_options
    ]
    if not types:
        return ""
    near = did_you_mean(name, (option.name for option in section.children()), cutoff=0.85)
    return (
        f"unknown with {path}.type '{section.type}'; it belongs to type {any_of(types)}: "
        f"leave it out, or add --{path}.type {types[0]}{near}"
    )


def _same_name(typed: str, tree: Option) -> list[str]:
    """Return paths with the name at the end of `typed`: in its section, else anywhere, shortest first."""
    section, _, name = typed.replace("-", "_").rpartition(".")
    names = (name, ALSO_CALLED.get(name))
    paths = [option.path for option in tree.descendants() if option.name in names]
    inside = [path for path in paths if section and path.startswith(f"{section}.")]
    return sorted(inside or paths, key=lambda path: path.count("."))


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Return dotted key -> (value before, value now) wherever two nested mappings differ."""
    changes: dict[str, tuple[Any, Any]] = {}
    for key in [*before, *(key for key in now if key not in before)]:
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            changes |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            changes[f"{prefix}{key}"] = (old, new)
    return changes


def flatten(options: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Flatten `{"model": {"ffn": 1}}` to `{"model.ffn": 1}`, without empty sections."""
    flat: dict[str, Any] = {}
    for key, value in options.items():
        if isinstance(value, Mapping):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = value
    return flat


def lookup(options: Mapping[str, Any], path: str) -> Any:
    """Return the value at a dotted path, such as `model.ffn.type`; None if it is absent."""
    value: Any = options
    for part in path.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    return value


# -- merging


def merge(base: Mapping[str, Any], update: Mapping[str, Any]) -> dict[str, Any]:
    """Merge `update` into `base`, mapping by mapping; a mapping of another `type` replaces the old one."""
    merged = dict(base)
    for key, new in update.items():
        old = _as_options(merged.get(key)) if isinstance(new, Mapping | str) else None
        if old is None:
            merged[key] = new
        elif isinstance(new, str):
            # `ffn: moe` keeps the options of an MoE that is already there.
            merged[key] = merged[key] if new == old.get("type") else new
        else:
            is_other_type = "type" in old and new.get("type", old["type"]) != old["type"]
            merged[key] = new if is_other_type else merge(old, new)
    return merged


def nest_options(options: Iterable[tuple[str, Any]]) -> dict[str, Any]:
    """Nest (dotted key, value) pairs; a later pair overrides an earlier one. An option inside a mapping
    overrides the mapping in any order, as in `--model.ffn.d_ff 64 --model.ffn swiglu`.
    """
    result: dict[str, Any] = {}
    for path, value in sorted(options, key=lambda option: option[0].count(".")):
        for key in reversed(path.split(".")):
            value = {key: value}
        result = merge(result, value)
    return result


def _as_options(value: Any) -> Mapping[str, Any] | None:
    """Return a mapping unchanged, and `swiglu` as `{type: swiglu}`; None for any other value, such as the
    duration `00:01:00:00`.
    """
    if isinstance(value, str) and not re.fullmatch(r"[0-9:]+", value.strip()):
        return {"type": value}
    return value if isinstance(value, Mapping) else None
