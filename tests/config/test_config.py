"""The base of every config: strict, frozen, and every mistake told by its path."""

from __future__ import annotations

import math
from typing import Any

import pytest
from pydantic import Field, ValidationError

from moe_ffn.config.base import Config
from moe_ffn.config.errors import did_you_mean, explain
from moe_ffn.ffn import DenseConfig
from tests.helpers.shape_family import OWN, Drawing, Options, mistakes

REFUSED: dict[str, tuple[dict[Any, Any], str]] = {
    "unknown": ({"titel": "x"}, "titel: unknown; did you mean 'title'?"),
    "unknown_far_off": ({"zzz": 1}, "zzz: unknown; known: title, shape, shapes, options"),
    "unknown_number": ({3: 1}, "3: unknown; known: title, shape, shapes, options"),
    "unknown_below": (
        {"options": {"required": 1, "cuont": 3}},
        "options.cuont: unknown; did you mean 'count'?",
    ),
    "unknown_in_a_member": (
        {"shape": {"type": "square", "sied": 3.0}},
        "shape.sied: unknown; did you mean 'side'?",
    ),
    "unknown_in_a_member_of_a_member": (
        {"shape": {"type": "circle", "inner": {"type": "square", "sied": 3.0}}},
        "shape.inner.sied: unknown; did you mean 'side'?",
    ),
    "unknown_in_a_mapping_of_members": (
        {"shapes": {"a": {"type": "square", "sied": 3.0}}},
        "shapes.a.sied: unknown; did you mean 'side'?",
    ),
    "braces_in_a_key": ({"{x}": 1}, "{x}: unknown; known: title, shape, shapes, options"),
    "missing_type": (
        {"shape": {"side": 3.0}},
        "shape.type: missing; one of: circle, ellipse, square, or my_file.py:ClassName",
    ),
    "unknown_type": (
        {"shape": {"type": "sqare"}},
        "shape.type: unknown 'sqare'; did you mean 'square'?; known: circle, ellipse, square",
    ),
    "unknown_shorthand": (
        {"shape": "sqare"},
        "shape.type: unknown 'sqare'; did you mean 'square'?; known: circle, ellipse, square",
    ),
    "null_type": (
        {"shape": {"type": None}},
        "shape.type: missing; one of: circle, ellipse, square, or my_file.py:ClassName",
    ),
    "empty_type": (
        {"shape": {"type": ""}},
        "shape.type: unknown ''; known: circle, ellipse, square",
    ),
    "a_file_without_a_class": (
        {"shape": "own.py"},
        "shape.type: 'own.py' is a file; name a class in it, as in own.py:ClassName",
    ),
    "a_number_for_a_family": ({"shape": 3}, "shape: must be a mapping of options, got 3"),
    "null_for_a_family": ({"shape": None}, "shape: must be a mapping of options, got None"),
    "a_list_for_a_config": ({"options": [1]}, "options: must be a mapping of options, got [1]"),
    "missing": ({"options": {}}, "options.required: missing; this option has no default"),
    "true_for_int": (
        {"options": {"required": True}},
        "options.required: must be a whole number, got True",
    ),
    "text_for_int": (
        {"options": {"required": "16"}},
        "options.required: must be a whole number, got '16'",
    ),
    "float_for_int": (
        {"options": {"required": 16.0}},
        "options.required: must be a whole number, got 16.0",
    ),
    "null_for_int": (
        {"options": {"required": None}},
        "options.required: must be a whole number, got None",
    ),
    "text_for_float": (
        {"options": {"required": 1, "rate": "1e-3"}},
        "options.rate: must be a number, got '1e-3'",
    ),
    "true_for_float": (
        {"options": {"required": 1, "rate": True}},
        "options.rate: must be a number, got True",
    ),
    "nan": (
        {"options": {"required": 1, "rate": math.nan}},
        "options.rate: must be a finite number, got nan",
    ),
    "inf": (
        {"options": {"required": 1, "rate": -math.inf}},
        "options.rate: must be a finite number, got -inf",
    ),
    "number_for_bool": (
        {"options": {"required": 1, "flag": 1}},
        "options.flag: must be true or false, got 1",
    ),
    "text_for_bool": (
        {"options": {"required": 1, "flag": "yes"}},
        "options.flag: must be true or false, got 'yes'",
    ),
    "number_for_text": (
        {"options": {"required": 1, "label": 3}},
        "options.label: must be text (in YAML, put quotes around it), got 3",
    ),
    "too_small": (
        {"options": {"required": 1, "count": 0}},
        "options.count: must be at least 1, got 0",
    ),
    "too_large": (
        {"options": {"required": 1, "count": 9}},
        "options.count: must be at most 8, got 9",
    ),
    "not_above": (
        {"shape": {"type": "square", "side": 0.0}},
        "shape.side: must be greater than 0.0, got 0.0",
    ),
    "too_short": (
        {"options": {"required": 1, "sizes": []}},
        "options.sizes: must not be empty, got []",
    ),
    "empty_text": (
        {"shape": {"type": f"{OWN}:Named", "name": ""}},
        "shape.name: must not be empty, got ''",
    ),
    "in_a_list": (
        {"options": {"required": 1, "sizes": [1, "2x"]}},
        "options.sizes.1: ",
    ),
    "parts_against_each_other": (
        {"title": "a"},
        "title ('a') must differ from options.label",
    ),
}


@pytest.mark.parametrize(("data", "line"), REFUSED.values(), ids=REFUSED)
def test_a_bad_value_is_refused_by_path(data: dict[str, Any], line: str) -> None:
    (got,) = mistakes(Drawing, data)
    if line.endswith(": "):
        assert got.startswith(line)
    else:
        assert got == line


def test_a_long_value_is_shortened() -> None:
    (line,) = mistakes(Drawing, {"options": {"required": "9" * 500}})
    assert len(line) < 120
    assert "9...9" in line


def test_every_mistake_has_its_line() -> None:
    data = {"shape": {"type": "squar"}, "options": {"required": 0.5, "count": 0}, "title": 1}
    assert mistakes(Drawing, data) == [
        "title: must be text (in YAML, put quotes around it), got 1",
        "shape.type: unknown 'squar'; did you mean 'square'?; known: circle, ellipse, square",
        "options.count: must be at least 1, got 0",
        "options.required: must be a whole number, got 0.5",
    ]


def test_arguments_in_code_are_checked_alike() -> None:
    with pytest.raises(ValidationError) as caught:
        Options(required=1, cuont=2)  # pyright: ignore[reportCallIssue]
    assert explain(caught.value) == ["cuont: unknown; did you mean 'count'?"]


def test_defaults_are_checked_too() -> None:
    class Wrong(Config, frozen=True):
        size: int = Field(default=0, ge=1)

    assert mistakes(Wrong, {}) == ["size: must be at least 1, got 0"]


@pytest.mark.parametrize(
    ("name", "known", "hint"),
    [
        ("num_expert", ["num_experts", "router"], "; did you mean 'num_experts'?"),
        ("xyz", ["num_experts"], ""),
        ("", ["a"], ""),
    ],
)
def test_did_you_mean_names_what_is_close(name: str, known: list[str], hint: str) -> None:
    assert did_you_mean(name, known) == hint


def test_configs_are_frozen() -> None:
    config = Drawing()
    with pytest.raises(ValidationError, match="frozen"):
        config.title = "b"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError, match="frozen"):
        DenseConfig().d_ff = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(DenseConfig()) == hash(DenseConfig())
