"""Errors and signals while custom code is imported."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.import_path import (
    Code,
    explaining_outside_errors,
    file_of_module,
    import_class,
    permitting_imports,
)


@pytest.fixture
def _heeding_ctrl_c() -> Iterator[None]:
    """Handle Ctrl-C as in a terminal; a process in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_heeding_ctrl_c")
def test_ctrl_c_while_a_file_is_imported_is_ctrl_c(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("import signal\nsignal.raise_signal(signal.SIGINT)\n")

    with pytest.raises(KeyboardInterrupt):
        import_class(f"{path}:X", object)


@pytest.fixture
def _ended_by_sigterm() -> Iterator[None]:
    def end(signum: int, frame: FrameType | None) -> None:
        raise SystemExit(143)

    before = signal.signal(signal.SIGTERM, end)
    yield
    signal.signal(signal.SIGTERM, before)


@pytest.mark.usefixtures("_ended_by_sigterm")
def test_sigterm_while_a_file_is_imported_ends_the_program(tmp_path: Path) -> None:
    path = tmp_path / "own.py"
    path.write_text("import signal\nsignal.raise_signal(signal.SIGTERM)\n")

    with pytest.raises(SystemExit):
        import_class(f"{path}:X", object)


def test_errors_without_custom_code_are_raised_unchanged() -> None:
    with pytest.raises(ZeroDivisionError), explaining_outside_errors():
        print(1 // 0)
    with (
        pytest.raises(ConfigError, match=r"^model.ffn failed: ZeroDivisionError: integer div"),
        explaining_outside_errors("model.ffn"),
    ):
        print(1 // 0)


def test_what_is_not_permitted_is_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "package_of_a_stranger"
    package.mkdir()
    (package / "__init__.py").write_text("raise AssertionError('run')")
    (package / "part.py").write_text("raise AssertionError('run')")
    monkeypatch.syspath_prepend(tmp_path)
    asked: list[Code] = []

    def refuse(code: Code) -> None:
        asked.append(code)
        raise ConfigError("no")

    with permitting_imports(refuse):
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
