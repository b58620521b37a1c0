"""The base of every config: strict, frozen, open to classes from outside, and there and back."""

from __future__ import annotations

import json
import math
from abc import abstractmethod
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import Field, ValidationError, model_validator

from moe_ffn import DecoderConfig, FFNConfig
from moe_ffn.config import Config, TaggedConfig
from moe_ffn.config_schema import json_schema
from moe_ffn.errors import did_you_mean, explain
from moe_ffn.experts.config import ExpertsConfig
from moe_ffn.ffn.config import DenseConfig
from moe_ffn.model.config import NormConfig, PositionsConfig
from moe_ffn.routing.config import RouterConfig

FAMILIES: list[type[TaggedConfig]] = [
    FFNConfig,
    RouterConfig,
    ExpertsConfig,
    PositionsConfig,
    NormConfig,
]


class Shape(TaggedConfig, frozen=True):
    """A family of the tests' own."""

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
    """Joins by its import path alone."""

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


# ------------------------------------------------------------------------------------- refusals

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
        "shape.type: missing; one of: square, circle, ellipse, or module:ClassName",
    ),
    "unknown_type": (
        {"shape": {"type": "sqare"}},
        "shape.type: unknown 'sqare'; did you mean 'square'?; known: square, circle, ellipse",
    ),
    "unknown_shorthand": (
        {"shape": "sqare"},
        "shape.type: unknown 'sqare'; did you mean 'square'?; known: square, circle, ellipse",
    ),
    "null_type": (
        {"shape": {"type": None}},
        "shape.type: missing; one of: square, circle, ellipse, or module:ClassName",
    ),
    "empty_type": (
        {"shape": {"type": ""}},
        "shape.type: unknown ''; known: square, circle, ellipse",
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
        "options.sizes: must have at least 1 entries, got []",
    ),
    "empty_text": (
        {"shape": {"type": f"{__name__}:Named", "name": ""}},
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
def test_refused(data: dict[str, Any], line: str) -> None:
    (got,) = mistakes(Drawing, data)
    if line.endswith(": "):
        assert got.startswith(line)
    else:
        assert got == line


def test_a_long_value_is_shortened() -> None:
    (line,) = mistakes(Drawing, {"options": {"required": "9" * 500}})
    assert len(line) < 120
    assert line.endswith("9...")


def test_every_mistake_has_its_line() -> None:
    data = {"shape": {"type": "squar"}, "options": {"required": 0.5, "count": 0}, "title": 1}
    assert mistakes(Drawing, data) == [
        "title: must be text (in YAML, put quotes around it), got 1",
        "shape.type: unknown 'squar'; did you mean 'square'?; known: square, circle, ellipse",
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
def test_did_you_mean(name: str, known: list[str], hint: str) -> None:
    assert did_you_mean(name, known) == hint


def test_configs_are_frozen() -> None:
    config = Drawing()
    with pytest.raises(ValidationError, match="frozen"):
        config.title = "b"  # pyright: ignore[reportAttributeAccessIssue]
    with pytest.raises(ValidationError, match="frozen"):
        DenseConfig().d_ff = 3  # pyright: ignore[reportAttributeAccessIssue]
    assert hash(DenseConfig()) == hash(DenseConfig())


# ------------------------------------------------------------------------------------- families


def test_a_name_is_short_for_a_mapping() -> None:
    assert Drawing(shape="circle").shape == Oval()  # pyright: ignore[reportArgumentType]
    assert Shape.model_validate("square") == Square()
    drawn = Drawing.model_validate({"shapes": {"a": "square", "b": {"type": "circle"}}})
    assert drawn.shapes == {"a": Square(), "b": Oval()}


def test_one_class_may_have_several_tags() -> None:
    ellipse = Shape.model_validate("ellipse")
    assert isinstance(ellipse, Oval)
    assert ellipse.type == "ellipse"


def test_a_config_is_taken_as_it_is() -> None:
    square = Square(side=3.0)
    assert Drawing(shape=square).shape == square
    assert Shape.model_validate(square) == square


def test_a_config_of_another_family_is_refused() -> None:
    (line,) = mistakes(Drawing, {"shape": DenseConfig()})
    assert line.startswith("shape: ")


def test_a_member_needs_no_tag_in_its_own_name() -> None:
    assert Square.model_validate({"side": 2.0}) == Square(side=2.0)


def test_a_member_refuses_the_tag_of_another() -> None:
    (line,) = mistakes(Square, {"type": "circle"})
    assert line == "type: must be one of 'square', got 'circle'"


def test_a_class_without_a_tag_is_named_by_its_import_path() -> None:
    named = Named.model_validate({"name": "n"})
    assert named.type == f"{__name__}:Named"
    assert Shape.model_validate(named.to_dict()) == named
    assert "Named" not in Shape.members


def test_no_class_takes_the_tag_of_another() -> None:
    # A subclass inherits the Literal, and would silently become what `square` means everywhere.
    message = (
        r"Cube would take the type 'square' from Square; give it a Literal of its own, or `type"
    )
    with pytest.raises(TypeError, match=message):

        class Cube(Square, frozen=True):
            depth: float = 1.0

    assert Shape.members["square"] is Square


def test_a_subclass_of_a_member_with_a_tag_of_its_own() -> None:
    class Tile(Square, frozen=True):
        type: Literal["tile"] = "tile"  # pyright: ignore[reportIncompatibleVariableOverride]

    try:
        assert isinstance(Shape.model_validate("tile"), Tile)
        assert type(Shape.model_validate("square")) is Square
    finally:
        del Shape.members["tile"]


def test_a_class_may_be_defined_again_under_its_own_name() -> None:
    # As when a notebook cell or a module is run twice.
    def define() -> type[Shape]:
        class Again(Shape, frozen=True):
            type: Literal["again"] = "again"

            def area(self) -> float:
                return 0.0

        return Again

    try:
        define()
        second = define()
        assert Shape.members["again"] is second
    finally:
        del Shape.members["again"]


@pytest.mark.parametrize(
    ("tag", "message"),
    [
        (
            "no_such_module:Shape",
            "importing 'no_such_module' failed: ModuleNotFoundError: No module",
        ),
        ("math:Shape", "'math' has no 'Shape'"),
        ("math:pi", "'math:pi' must be a subclass of Shape, got 3.14159"),
        ("moe_ffn.ffn.config:DenseConfig", "must be a subclass of Shape, got <class"),
        ("nowhere.py:Shape", "importing 'nowhere.py' failed: FileNotFoundError"),
        (f"{__name__}:Nam", f"'{__name__}' has no 'Nam'; did you mean 'Named'?"),
        (f"{__name__}:Shape", f"'{__name__}:Shape' must define area"),
        (":Named", "importing '' failed: ValueError: Empty module name"),
        (f"{__name__}:", f"'{__name__}' has no ''"),
    ],
)
def test_import_paths_that_lead_nowhere(tag: str, message: str) -> None:
    (line,) = mistakes(Drawing, {"shape": tag})
    assert line.startswith("shape.type: ")
    assert message in line


def test_a_file_is_imported_once(tmp_path: Path) -> None:
    path = tmp_path / "own shape.py"
    path.write_text(
        f"from {__name__} import Shape\n"
        "class Own(Shape, frozen=True):\n"
        "    def area(self) -> float:\n"
        "        return 7.0\n"
    )
    first, second = (Shape.model_validate(f"{path}:Own") for _ in range(2))
    assert first.area() == 7
    assert type(first) is type(second)


# ------------------------------------------------------------------------------- there and back


@pytest.mark.parametrize(
    ("family", "tag"),
    [(family, tag) for family in FAMILIES for tag in family.members],
    ids=lambda value: value if isinstance(value, str) else value.__name__,
)
def test_every_member_goes_to_a_dict_and_back(family: type[TaggedConfig], tag: str) -> None:
    config = family.model_validate(tag)
    plain = config.to_dict()
    assert plain["type"] == tag
    assert family.model_validate(plain) == config
    assert json.loads(json.dumps(plain, allow_nan=False)) == plain  # nothing but plain values


def test_nested_members_keep_the_options_of_their_own_class() -> None:
    data = {
        "ffn": {
            "type": "moe",
            "experts": {"type": "geglu", "d_ff": 12},
            "shared_expert": {"type": "conv", "kernel_size": 2},
        },
        "ffn_at": {"0": {"type": "dense", "activation": "relu"}},
        "positions": {"type": "rope", "base": 500.0},
    }
    config = DecoderConfig.model_validate(data)
    plain = config.to_dict()
    assert plain["ffn"]["experts"]["d_ff"] == 12
    assert plain["ffn"]["shared_expert"]["kernel_size"] == 2
    assert plain["ffn_at"]["0"]["activation"] == "relu"
    assert plain["positions"] == {"type": "rope", "base": 500.0}
    assert DecoderConfig.model_validate(plain) == config
    assert DecoderConfig.model_validate(json.loads(json.dumps(plain))) == config


# -------------------------------------------------------------------------------- JSON schema


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    return json_schema(DecoderConfig)


def nodes(node: Any) -> list[dict[str, Any]]:
    if isinstance(node, list):
        return [found for item in node for found in nodes(item)]
    if isinstance(node, dict):
        return [node, *(found for item in node.values() for found in nodes(item))]
    return []


def test_schema_is_finite_json(schema: dict[str, Any]) -> None:
    text = json.dumps(schema, allow_nan=False)
    assert json.loads(text) == schema
    assert len(text) < 200_000


def test_schema_references_all_lead_somewhere(schema: dict[str, Any]) -> None:
    references = {node["$ref"] for node in nodes(schema) if "$ref" in node}
    assert "#/$defs/FFNConfig" in references
    for reference in references:
        assert reference.startswith("#/$defs/")
        assert schema["$defs"][reference.removeprefix("#/$defs/")], reference
    assert not any("x-family" in node for node in nodes(schema))


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_schema_knows_every_member(schema: dict[str, Any], family: type[TaggedConfig]) -> None:
    branches = schema["$defs"][family.__name__]["anyOf"]
    named = [branch["enum"] for branch in branches if "enum" in branch]
    assert named == [list(family.members)]  # the shorthand
    tags = set()
    for branch in branches:
        tag = branch.get("properties", {}).get("type", {})
        tags |= set(tag.get("enum", [])) | {tag[key] for key in ("const",) if key in tag}
    assert tags == set(family.members)
    # and classes of one's own, by import path
    assert any(b.get("properties", {}).get("type", {}).get("pattern") == ":" for b in branches)


def test_schema_explains_and_bounds(schema: dict[str, Any]) -> None:
    layers = schema["properties"]["num_layers"]
    assert layers["minimum"] == 1
    assert layers["description"].startswith("Blocks of attention")
    assert schema["additionalProperties"] is False
