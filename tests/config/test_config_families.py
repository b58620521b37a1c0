"""Families of configs: members by tag, by name alone, and by import path."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import pytest

from tests.helpers.shape_family import OWN, Drawing, Named, Oval, Shape, Square, mistakes


def test_a_name_is_short_for_a_mapping() -> None:
    assert Drawing(shape="circle").shape == Oval()  # pyright: ignore[reportArgumentType]
    assert Shape.model_validate("square") == Square()
    drawn = Drawing.model_validate({"shapes": {"a": "square", "b": {"type": "circle"}}})
    assert drawn.shapes == {"a": Square(), "b": Oval()}


def test_one_class_may_have_several_tags() -> None:
    ellipse = Shape.model_validate("ellipse")
    assert isinstance(ellipse, Oval)
    assert ellipse.type == "ellipse"


def test_a_class_without_a_tag_is_named_by_its_import_path() -> None:
    named = Named.model_validate({"name": "n"})
    assert named.type == f"{OWN}:Named"
    assert Shape.model_validate(named.to_dict()) == named
    assert "Named" not in Shape.members


def test_no_class_takes_the_tag_of_another() -> None:
    # A subclass inherits the Literal, and would silently become what `square` means everywhere.
    message = r"Cube\.type: 'square' is already the type of Square; choose another Literal, or annotate `type"
    with pytest.raises(TypeError, match=message):

        class Cube(Square, frozen=True):
            depth: float = 1.0

    assert Shape.members["square"] is Square


def test_a_subclass_with_another_tag_is_a_second_member() -> None:
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
        ("moe_ffn.ffn:DenseConfig", "must be a subclass of Shape, got <class"),
        ("nowhere.py:Shape", "importing 'nowhere.py' failed: FileNotFoundError"),
        (f"{OWN}:Nam", f"'{OWN}' has no 'Nam'; did you mean 'Named'?"),
        (f"{OWN}:Shape", f"'{OWN}:Shape' must define area"),
        (":Named", "importing '' failed: ValueError: Empty module name"),
        (f"{OWN}:", f"'{OWN}' has no ''"),
    ],
)
def test_import_paths_that_lead_nowhere_are_refused(tag: str, message: str) -> None:
    (line,) = mistakes(Drawing, {"shape": tag})
    assert line.startswith("shape.type: ")
    assert message in line


def test_a_file_is_imported_once(tmp_path: Path) -> None:
    path = tmp_path / "own shape.py"
    path.write_text(
        f"from {OWN} import Shape\n"
        "class Own(Shape, frozen=True):\n"
        "    def area(self) -> float:\n"
        "        return 7.0\n"
    )
    first, second = (Shape.model_validate(f"{path}:Own") for _ in range(2))
    assert first.area() == 7
    assert type(first) is type(second)
