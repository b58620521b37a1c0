"""Errors and signals while custom code is imported."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.import_path import (
    Code,
    explaining_custom_errors,
    file_of_module,
    import_class,
    permitting_imports,
)


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
