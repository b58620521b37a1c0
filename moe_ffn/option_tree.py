"""The options of a config as a tree: every option by its dotted path, with its value and its meaning."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import ValidationError

from moe_ffn.config import Config, TaggedConfig
from moe_ffn.errors import ConfigError, explain


@dataclass(frozen=True)
class Option:
    """One key of a config, or the config itself, whose path is empty."""

    path: str
    """Dotted, `model.ffn.router.k`."""
    annotation: Any
    value: Any
    """As YAML has it; of a section a mapping, or the name of its type."""
    meaning: str

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def family(self) -> type[TaggedConfig] | None:
        """The family whose member this is; None where there is nothing to choose."""
        declared = _declared_config(self.annotation)
        if (
            declared is not None
            and issubclass(declared, TaggedConfig)
            and declared.is_family_root()
        ):
            return declared
        return None

    @property
    def config(self) -> type[Config] | None:
        """The class that its value is of; None for a plain value and for null.

        Raises:
            ConfigError: the value names a type that there is not.
        """
        declared = _declared_config(self.annotation)
        if declared is None or self.value is None or self.outside_type is not None:
            return None
        value = {"type": self.value} if isinstance(self.value, str) else self.value
        if not isinstance(value, Mapping):
            return None
        try:
            return declared.class_for(value)
        except ValidationError as error:
            raise ConfigError(
                "\n".join(f"{self.path}.{line}" for line in explain(error))
            ) from error

    @property
    def outside_type(self) -> str | None:
        """The type, where it names a class from outside of this package, whose code nobody runs for this."""
        tag = self.value.get("type") if isinstance(self.value, Mapping) else self.value
        return tag if self.family is not None and isinstance(tag, str) and ":" in tag else None

    def children(self) -> list[Option]:
        """The options of a section, in order; none of a plain value."""
        if (tag := self.outside_type) is not None:
            text = "Its own options are not listed, since --help runs nobody's code; --print-config has them."
            return [Option(self._below("type"), None, tag, f"{self.meaning} {text}".lstrip())]
        config = self.config
        return [] if config is None else self.options_of(config)

    def options_of(self, config: type[Config]) -> list[Option]:
        """The options that stand below this one where its value is of `config`."""
        fields = []
        for name, field in config.model_fields.items():
            value = self.value.get(name) if isinstance(self.value, Mapping) else None
            if value is None:
                value = "(required)" if field.is_required() else field.get_default()
            value = value.to_dict() if isinstance(value, Config) else value
            meaning = " ".join((field.description or "").split())
            if name == "type" and issubclass(config, TaggedConfig):
                meaning = f"{first_sentence(config)} One of: {', '.join(_types(config))}.".lstrip()
            elif get_origin(field.annotation) is Literal:
                meaning += f" One of: {', '.join(map(str, get_args(field.annotation)))}."
            fields.append(Option(self._below(name), field.annotation, value, meaning))
        return fields

    def switched_on(self) -> Option:
        """A section that is null as it would be with its defaults; others as they are."""
        if self.value is None and self.family is None and _declared_config(self.annotation):
            return Option(self.path, self.annotation, {}, self.meaning)
        return self

    def leaves(self) -> Iterator[Option]:
        """Every option at and below this one that is no section."""
        children = self.children()
        if not children and self.config is None:
            yield self
        for child in children:
            yield from child.leaves()

    def everything(self) -> Iterator[Option]:
        """Every option and section below this one; what names an unknown type is passed over."""
        try:
            children = self.children()
        except ConfigError:
            return
        for child in children:
            yield child
            yield from child.everything()

    def find(self, path: str) -> Option | None:
        """The option or section below this one that has this path; sections that are null are gone into."""
        option = self
        for name in path.split("."):
            found = [child for child in option.switched_on().children() if child.name == name]
            if not found:
                return None
            (option,) = found
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
    """What a config says of itself in the first line of its docstring; empty without (`python -OO`)."""
    lines = (config.__doc__ or "").strip().splitlines()
    return f"{lines[0].rstrip('.')}." if lines else ""


def show_value(value: Any) -> str:
    """A value as YAML has it."""
    if value is None:
        return "null"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _types(config: type[TaggedConfig]) -> list[str]:
    root = next(
        base for base in config.__mro__ if issubclass(base, TaggedConfig) and base.is_family_root()
    )
    return [*root.members, "my_file.py:ClassName"]


def _declared_config(annotation: Any) -> type[Config] | None:
    """The config that a field with this annotation may hold."""
    is_union = get_origin(annotation) in (Union, UnionType)
    for candidate in get_args(annotation) if is_union else [annotation]:
        if isinstance(candidate, type) and issubclass(candidate, Config):
            return candidate
    return None


ALSO_CALLED = {
    "bs": "batch_size",
    "clip": "gradient_clip_val",
    "dataset": "corpus",
    "device": "accelerator",
    "dtype": "precision",
    "epochs": "max_steps",
    "experts": "num_experts",
    "gpus": "devices",
    "grad_accum": "accumulate_grad_batches",
    "heads": "num_heads",
    "hidden_size": "d_model",
    "iters": "max_steps",
    "layers": "num_layers",
    "lr": "learning_rate",
    "max_epochs": "max_steps",
    "output": "output_dir",
    "steps": "max_steps",
    "top_k": "k",
    "warmup": "warmup_fraction",
    "wd": "weight_decay",
}
"""What other programs and papers call an option -> the last part of its path here."""

MAX_NAMED = 3
"""Of more options than this that might be meant, the first are named."""


def same_name(typed: str, tree: Option, prefix: str = "") -> str:
    """`"; did you mean 'optimizer.learning_rate'?"` for `trainer.learning_rate`, or for `lr`.

    The empty string where no option of the chosen types is called that.

    Args:
        typed: the path that is no option.
        prefix: before each path in the answer.
    """
    return _ask(_same_name(typed, [option.path for option in tree.everything()]), prefix)


def did_you_mean_option(typed: str, tree: Option, prefix: str = "") -> str:
    """The same where an option of another type is called that, or one that looks like it."""
    here = [option.path for option in tree.everything()]
    found = (
        _same_name(typed, here)
        or _same_name(typed, _of_other_types(tree))
        or _similar_name(typed, here)
    )
    return _ask(found, prefix)


def belongs_to_another_type(typed: str, tree: Option) -> str:
    """Which types of its section know the last part of this path; the empty string where none does."""
    path, _, name = typed.rpartition(".")
    section = tree.find(path) if path else None
    if section is None or section.family is None:
        return ""
    members = members_of(section.family)
    types = [
        type_ for member in members if name in member.known_keys() for type_ in members[member]
    ]
    if not types:
        return ""
    chosen = section.value["type"] if isinstance(section.value, Mapping) else section.value
    named = " or ".join(f"'{type_}'" for type_ in types[:MAX_NAMED])
    return f"unknown with {path}.type '{chosen}'; it belongs to type {named}: add --{path}.type {types[0]}"


def _ask(paths: Sequence[str], prefix: str) -> str:
    named = " or ".join(f"'{prefix}{path}'" for path in paths[:MAX_NAMED])
    return f"; did you mean {named}?" if named else ""


def _same_name(typed: str, paths: Iterable[str]) -> list[str]:
    """The paths that end as `typed` does: those that have most of it, and of them the shortest first."""
    *above, name = typed.replace("-", "_").split(".")
    names = (name, ALSO_CALLED.get(name))
    found = [path for path in dict.fromkeys(paths) if path.rpartition(".")[2] in names]
    common = {path: _num_common(above, path.split(".")[:-1]) for path in found}
    most = max(common.values(), default=0)
    return sorted((p for p in found if common[p] == most), key=lambda path: path.count("."))


def _similar_name(typed: str, paths: Sequence[str]) -> list[str]:
    above, _, name = typed.replace("-", "_").rpartition(".")
    names = dict.fromkeys(path.rpartition(".")[2] for path in paths)
    near = difflib.get_close_matches(name, names, n=1)
    return _same_name(f"{above}.{near[0]}", paths) if near else []


def _num_common(above: Sequence[str], of_path: Sequence[str]) -> int:
    """How many parts of a path, from its end, are the same."""
    count = 0
    for one, other in zip(reversed(above), reversed(of_path), strict=False):
        if one != other:
            break
        count += 1
    return count


def _of_other_types(tree: Option) -> list[str]:
    """The options of the types that are not chosen, where they would stand."""
    return [
        option.path
        for section in tree.everything()
        if section.family is not None
        for member in members_of(section.family)
        for option in section.options_of(member)
    ]
