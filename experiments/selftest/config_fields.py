"""Every field of a config, with what makes it appear and what it must not be given."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

import annotated_types

from moe_ffn.config import Config, TaggedConfig

NAN, INFINITE = float("nan"), float("inf")
_WRONG: dict[Any, tuple[Any, ...]] = {
    int: ("three", "3", "", 1.5, True, False, [1], {"a": 1}, NAN, INFINITE, -INFINITE),
    float: ("three", "0.5", "", True, False, [0.5], {"a": 1}, NAN, INFINITE, -INFINITE),
    bool: ("maybe", "", 0, 1, 1.0, [True], {"a": 1}),
    str: (3, 1.5, True, ["x"], {"a": "x"}, NAN),
    Literal: ("no such choice", "", 3, 1.5, True, [], {"a": 1}),
    tuple: (3, 1.5, True, {"a": 1}, [[]], [{"a": 1}]),
    dict: (3, "moe", True, ["moe"]),
    Config: (3, 1.5, True, [], ["moe"]),
}
"""By kind of field: values of other kinds."""


@dataclass(frozen=True)
class Field:
    """One option, somewhere in the tree."""

    path: tuple[str, ...]
    annotation: Any
    bounds: tuple[Any, ...]
    """Of `annotated_types`: `Ge(1)` and the like."""
    chosen: tuple[tuple[tuple[str, ...], Any], ...]
    """Options without which this one is not there: the types of the families above it."""

    @property
    def dotted(self) -> str:
        return ".".join(self.path)

    @property
    def is_optional(self) -> bool:
        return type(None) in get_args(self.annotation)

    @property
    def kind(self) -> Any:
        """A key of the table of wrong values."""
        alone = _alone(self.annotation)
        if isinstance(alone, type) and issubclass(alone, Config):
            return Config
        return get_origin(alone) or alone

    def wrong_values(self) -> Iterator[Any]:
        """What must be refused: values of other kinds, and those out of range."""
        yield from _WRONG[self.kind]
        if not self.is_optional:
            yield None
        alone = _alone(self.annotation)
        if self.kind is Config and not issubclass(alone, TaggedConfig):
            yield "moe"
        if self.kind is Config and issubclass(alone, TaggedConfig):
            yield from ("no_such_type", {"type": None}, {"type": 3}, {"type": ["moe"]})
        for bound in self.bounds:
            yield from _beyond(bound, self.kind)


def fields_of(root: type[Config]) -> list[Field]:
    """Every field below `root`, of every member of every family, each member once."""
    return list(_below(root, (), (), set()))


def _below(
    config: type[Config],
    path: tuple[str, ...],
    chosen: tuple[tuple[tuple[str, ...], Any], ...],
    seen: set[type[Config]],
) -> Iterator[Field]:
    for name, field in config.model_fields.items():
        here = (*path, name)
        if name == "type" and issubclass(config, TaggedConfig):
            continue
        others = tuple(
            ((*path, other), _some(found.annotation))
            for other, found in config.model_fields.items()
            if found.is_required() and other != name
        )
        yield Field(here, field.annotation, tuple(field.metadata), (*chosen, *others))
        inner = _alone(field.annotation)
        if not (isinstance(inner, type) and issubclass(inner, Config)):
            continue
        members = (
            dict.fromkeys(inner.members.values())
            if issubclass(inner, TaggedConfig) and inner.is_family_root()
            else (inner,)
        )
        new = [member for member in members if member not in seen]
        seen.update(new)  # a family that holds itself is walked where it stands first
        for member in new:
            tag = _tag(member)
            choice = () if tag is None else (((*here, "type"), tag),)
            yield from _below(member, here, (*chosen, *choice), seen)


def _alone(annotation: Any) -> Any:
    """`X` of `X | None`."""
    if get_origin(annotation) in (Union, UnionType):
        return next(part for part in get_args(annotation) if part is not type(None))
    return annotation


def _some(annotation: Any) -> Any:
    """A value that a required field takes."""
    return 1 if annotation is int else ["x"] if get_origin(annotation) is tuple else "x"


def _tag(config: type[Config]) -> str | None:
    if not issubclass(config, TaggedConfig):
        return None
    return next(tag for tag, member in config.members.items() if member is config)


def _beyond(bound: Any, kind: Any) -> Iterator[Any]:
    """Values just outside a bound, and far outside."""
    step = 1 if kind is int else 0.001
    limit: Any = bound
    match bound:
        case annotated_types.Ge():
            yield from (limit.ge - step, limit.ge - 10**12)
        case annotated_types.Gt():
            yield from (limit.gt, limit.gt - 10**12)
        case annotated_types.Le():
            yield from (limit.le + step, limit.le + 10**30)
        case annotated_types.Lt():
            yield from (limit.lt, limit.lt + 10**30)
        case annotated_types.MinLen():
            yield "" if kind is str else []
        case _:
            pass
