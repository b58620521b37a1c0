"""The parser of a command line with a few fixed options; options by path: `experiments.command_line`."""

from __future__ import annotations

import argparse
import platform
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from moe_ffn.cli.help import wrap
from moe_ffn.errors import ConfigError, reason
from moe_ffn.files import write_whole

MAX_COUNT = 1_000_000_000
"""Of anything that is counted: what is larger was not meant."""


def whole_number(text: str, least: int = 0, most: int = MAX_COUNT) -> int | None:
    """What was typed, in the digits 0 to 9; None where it is no number within these limits."""
    # Python reads other digits too, and takes long for very many of them.
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        return None
    number = int(text)
    return number if least <= number <= most else None


class Parser(argparse.ArgumentParser):
    """Answers `--version`, raises ConfigError for a mistake, and splits no word of its help."""

    def __init__(self, **options: Any) -> None:
        """A parser with the options of `argparse.ArgumentParser`."""
        super().__init__(**{"formatter_class": _Formatter, **options})
        self.add_argument(
            "--version",
            action=_Version,
            nargs=0,
            dest=argparse.SUPPRESS,  # no value among those of the options
            default=argparse.SUPPRESS,
            help="print the versions of this package, torch and Python, and stop",
        )

    def error(self, message: str) -> Any:
        raise ConfigError(message)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> None:
        print(versions())
        parser.exit()


class _Formatter(argparse.HelpFormatter):
    """The description and the epilog keep their lines, wrapped at the terminal's width."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return wrap(text, width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width).split("\n")


def versions() -> str:
    """`moe_ffn 0.1.0, torch 2.13.0, Python 3.11.4`."""
    packages = ", ".join(f"{name} {_version(name)}" for name in ("moe_ffn", "torch"))
    return f"{packages}, Python {platform.python_version()}"


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:  # run from a checkout that is not installed
        return "(not installed)"


def check_output(option: str, path: Path, opening: str) -> None:
    """Look whether `write_output` could write this file; writes nothing.

    Args:
        opening: how such a file begins. What begins otherwise is somebody else's, as a run's own files are.

    Raises:
        ConfigError: it could not, or something else would be lost.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        if path.exists() and not path.is_file():  # it would be replaced, /dev/null too
            raise ConfigError(f"{option}: '{path}' is no regular file; choose another file")
        if path.exists() and not _begins(path, opening):
            raise ConfigError(
                f"{option}: '{path}' exists and was not made by this program; choose another file, or "
                "remove it"
            )
        # Only trying tells: root may write anywhere, except where the file system says no.
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise _cannot_write(option, path, error) from error


def write_output(option: str, path: Path, text: str) -> None:
    """Put a file in its place; ConfigError that names the option where it cannot be written."""
    try:
        write_whole(path, text.encode(errors="backslashreplace"))  # of a name that is not UTF-8
    except OSError as error:
        raise _cannot_write(option, path, error) from error


def _begins(path: Path, opening: str) -> bool:
    """Whether the file begins so, or is empty."""
    with path.open("rb") as file:
        return file.read(len(opening)) in (b"", opening.encode())


def _cannot_write(option: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{option}: '{path}' cannot be written ({reason(error)}); choose another file"
    )
