"""A family of configs for tests only. A module: classes have import paths."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from moe_ffn.config.base import Config, TaggedConfig
from moe_ffn.config.errors import explain

OWN = __name__


class Shape(TaggedConfig, frozen=True):
    """The family."""

    @abstractmethod
    def area(self) -> float: ...


class Square(Shape, frozen=True):
    type: Literal["square"] = "square"
    side: float = Field(default=1.0, gt=0)

    def area(self) -> float:
        return self.side**2


class Oval(Shape, frozen=True):
    type: Literal["circle", "ellipse"] = "circle"
    width: int = Field(default=2, ge=1)
    inner: Shape | None = None

    def area(self) -> float:
        return math.pi * self.width**2


class Named(Shape, frozen=True):
    """Joins only by its import path."""

    name: str = Field(default="x", min_length=1)

    def area(self) -> float:
        return 0.0


class Options(Config, frozen=True):
    count: int = Field(default=1, ge=1, le=8)
    rate: float = 0.5
    flag: bool = False
    label: str = "a"
    required: int
    sizes: Annotated[tuple[int, ...], Field(strict=False, min_length=1)] = (1,)


class Drawing(Config, frozen=True):
    title: str = "untitled"
    shape: Shape = Square()
    shapes: dict[str, Shape] = Field(default={})
    options: Options = Options(required=1)

    @model_validator(mode="after")
    def _check(self) -> Drawing:
        if self.title == self.options.label:
            raise ValueError(f"title ('{self.title}') must differ from options.label")
        return self


def mistakes(cls: type[Config], data: Any) -> list[str]:
    with pytest.raises(ValidationError) as caught:
        cls.model_validate(data)
    return explain(caught.value)
