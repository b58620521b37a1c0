"""Options of a config, with the options they depend on and the values they must reject."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from moe_ffn.config.base import Config, TaggedConfig
from moe_ffn.config.option_tree import merge

NAN, INFINITE = float("nan"), float("inf")
WRONG: dict[Any, tuple[Any, ...]] = {
    int: ("three", "3", "", 1.5, True, False, [1], {"a": 1}, NAN, INFINITE, -INFINITE),
    float: ("three", "0.5", "", True, False, [0.5], {"a": 1}, NAN, INFINITE, -INFINITE),
    bool: ("maybe", "", 0, 1, 1.0, [True], {"a": 1}),
    str: (3, 1.5, True, ["x"], {"a": "x"}, NAN),
    Literal: ("no such choice", "", 3, 1.5, True, [], {"a": 1}),
    tuple: (3, 1.5, True, {"a": 1}, [[]], [{"a": 1}]),
    dict: (3, "moe", True, ["moe"]),
    Config: (3, 1.5, True, [], ["moe"]),
}
"""Values of other kinds, by kind of option."""


@dataclass(frozen=True)
class Field:
    """An option and its place in the tree."""

    path: tuple[str, ...]
    annotation: Any
    bounds: tuple[Any, ...]
    """Bounds of `annotated_types`, such as `Ge(1)`."""
    around: dict[str, Any]
    """Options without which this one is not there: the types of the families above it."""

    def given(self, value: Any, name: str | None = None) -> dict[str, Any]:
        """Return a config with this value for the option, or for a sibling option `name`."""
        return merge(self.around, nested((*self.path[:-1], name or self.path[-1]), value))

    def wrong_values(self) -> Iterator[Any]:
        """Values of other kinds, and those out of range."""
        of = _without_none(self.annotation)
        is_config = isinstance(of, type) and issubclass(of, Config)
        kind = Config if is_config else get_origin(of) or of
        kinds = _kinds(self.annotation)
        if len(kinds) > 1:
            values = (value for of_kind in WRONG.values() for value in of_kind)
            yield from (value for value in values if type(value) not in kinds)
        else:
            yield from WRONG[kind]
        if type(None) not in get_args(self.annotation):
            yield None
        if is_config and issubclass(of, TaggedConfig):
            yield from ("no_such_type", {"type": None}, {"type": 3}, {"type": ["moe"]})
        elif is_config:
            yield "moe"
        for bound in self.bounds:
            yield from _beyond(bound, kind)


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    """The value in a mapping in a mapping, by the keys of the path."""
    for key in reversed(path):
        value = {key: value}
    return value


def fields_of(
    config: type[Config],
    path: tuple[str, ...] = (),
    around: dict[str, Any] | None = None,
    seen: set[type[Config]] | None = None,
) -> Iterator[Field]:
    """Options below a config, of every member of every family; each member only at its first place."""
    seen = set() if seen is None else seen
    for name, field in config.model_fields.items():
        if name == "type" and issubclass(config, TaggedConfig):
            continue
        here, known = (*path, name), around or {}
        for other, found in config.model_fields.items():
            if found.is_required() and other != name:
                known = merge(known, nested((*path, other), _some(found.annotation)))
        annotation, bounds = field.annotation, field.metadata
        if get_origin(number := _without_none(annotation)) is Annotated:
            # A width: of the mapping that may stand in its place tests/ffn/test_match.py is.
            annotation, bounds = get_args(number)[0] | None, get_args(number)[1].metadata
        yield Field(here, annotation, tuple(bounds), known)
        for member, tag in _members(_without_none(field.annotation)):
            if member not in seen:
                seen.add(member)
                choice = {} if tag is None else nested((*here, "type"), tag)
                yield from fields_of(member, here, merge(known, choice), seen)


def _members(annotation: Any) -> list[tuple[type[Config], str | None]]:
    """Members that an option may hold, with their types; empty if it holds no config."""
    if not (isinstance(annotation, type) and issubclass(annotation, Config)):
        return []
    if not (issubclass(annotation, TaggedConfig) and annotation.is_family_root()):
        return [(annotation, None)]
    by_member = {member: tag for tag, member in reversed(annotation.members.items())}
    return [(member, by_member[member]) for member in dict.fromkeys(annotation.members.values())]


def _kinds(annotation: Any) -> list[type]:
    """The types of which a union takes values; a choice among names is text."""
    if get_origin(annotation) not in (Union, UnionType):
        return [annotation]
    kinds = (get_origin(part) or part for part in get_args(annotation))
    return [str if kind is Literal else kind for kind in kinds if kind is not type(None)]


def _without_none(annotation: Any) -> Any:
    """`X` of `X | None`."""
    if get_origin(annotation) in (Union, UnionType):
        return next(part for part in get_args(annotation) if part is not type(None))
    return annotation


def _some(annotation: Any) -> Any:
    """A value that a required option takes."""
    return 1 if annotation is int else ["x"] if get_origin(annotation) is tuple else "x"


def _beyond(bound: Any, kind: Any) -> list[Any]:
    """The value just outside a bound."""
    step = 1 if kind is int else 0.001
    beyond: list[Any] = [
        getattr(bound, name) + offset
        for name, offset in {"ge": -step, "gt": 0, "le": step, "lt": 0}.items()
        if hasattr(bound, name)
    ]
    if hasattr(bound, "min_length"):
        beyond.append("" if kind is str else [])
    return beyond
