"""Families of configs: members by tag, only by name, and by import path, with errors of custom code."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Literal

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.import_path import (
    Code,
    explaining_custom_errors,
    file_of_module,
    import_class,
    permitting_imports,
)
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
def test_import_paths_that_lead_nowhere_are_rejected(tag: str, message: str) -> None:
    (line,) = mistakes(Drawing, {"shape": tag})
    assert line.startswith("shape.type: ")
    assert message in line


def test_a_class_with_its_own_tag_says_how_to_use_its_import_path(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        f"from typing import Literal\nfrom {OWN} import Square\n"
        "class Own(Square, frozen=True):\n    type: Literal['own'] = 'own'\n"
    )
    try:
        (line,) = mistakes(Drawing, {"shape": f"{path}:Own"})
    finally:
        del Shape.members["own"]
    assert line.startswith("shape.type: must be one of 'own', got '/")
    assert line.endswith("; annotate `type: str` in Own to use its import path")
    path.write_text(path.read_text().replace("Literal['own'] = 'own'", "str"))
    assert Drawing.model_validate({"shape": f"{path}:Own"}).shape.area() == Square().area()


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


def end(signum: int, frame: FrameType | None) -> None:
    raise SystemExit(143)


@pytest.mark.parametrize(
    ("signum", "handler", "error"),
    [
        # As in a terminal; a process in the background of a shell ignores Ctrl-C.
        (signal.SIGINT, signal.default_int_handler, KeyboardInterrupt),
        (signal.SIGTERM, end, SystemExit),
    ],
)
def test_a_signal_while_a_file_is_imported_is_no_error_of_it(
    tmp_path: Path, signum: int, handler: Callable[..., object], error: type[BaseException]
) -> None:
    path = tmp_path / "own.py"
    path.write_text(f"import signal\nsignal.raise_signal({int(signum)})\n")
    before = signal.signal(signum, handler)

    try:
        with pytest.raises(error):
            import_class(f"{path}:X", object)
    finally:
        signal.signal(signum, before)


def test_errors_without_custom_code_are_raised_unchanged() -> None:
    with pytest.raises(ZeroDivisionError), explaining_custom_errors():
        print(1 // 0)
    with (
        pytest.raises(ConfigError, match=r"^model.ffn failed: ZeroDivisionError: integer div"),
        explaining_custom_errors("model.ffn"),
    ):
        print(1 // 0)


def test_code_without_permission_is_not_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "package_of_a_stranger"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('run')")
    (package / "part.py").write_text("raise AssertionError('run')")
    monkeypatch.syspath_prepend(tmp_path)
    asked: list[Code] = []

    def reject(code: Code) -> None:
        asked.append(code)
        raise ConfigError("no")

    with permitting_imports(reject):
        for tag in ("package_of_a_stranger", "package_of_a_stranger.part", f"{package}/part.py"):
            with pytest.raises(ConfigError, match=r"^no$"):
                import_class(f"{tag}:X", object)

    assert [code.path for code in asked] == [
        package / "__init__.py",
        package / "part.py",
        package / "part.py",
    ]
    assert file_of_module("package_of_a_stranger.nothing") is None
    assert file_of_module("no_such_package.part") is None
