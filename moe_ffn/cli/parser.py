"""Shared parts of all command lines: the parser, numbers, files to write, wrapped text."""

from __future__ import annotations

import argparse
import platform
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any

from moe_ffn.cli.logs import SetLevel
from moe_ffn.config import trust
from moe_ffn.config.base import MAX_COUNT
from moe_ffn.config.errors import ConfigError, did_you_mean, nearest_or_all
from moe_ffn.files import reason, write_whole


def whole_number(text: str, least: int = 0, most: int = MAX_COUNT) -> int | None:
    """Return the number in a text of digits 0 to 9; None if it is no number within the limits."""
    # Python reads other digits too, and takes long for very many of them.
    if not (text.isascii() and text.isdigit() and len(text) <= 20):
        return None
    number = int(text)
    return number if least <= number <= most else None


def whole(least: int = 0, most: int = MAX_COUNT) -> Callable[[str], int]:
    """Return a type of option: whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        number = whole_number(text, least, most)
        if number is None:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} to {most}, got '{text}'"
            )
        return number

    return parse


def layer_numbers(text: str) -> list[int]:
    """Parse `0,3` to [0, 3]; a type of option."""
    parts = [whole_number(part.strip()) for part in text.split(",")]
    layers = [part for part in parts if part is not None]
    if len(layers) < len(parts):
        raise argparse.ArgumentTypeError(
            f"must be numbers of layers with commas between them, as in 0,3, got '{text}'"
        )
    return layers


class Parser(argparse.ArgumentParser):
    """Parser that answers `--version`, raises ConfigError for a mistake, and splits no word of its help."""

    def __init__(self, **options: Any) -> None:
        """Take the options of `argparse.ArgumentParser`."""
        defaults = {"formatter_class": _Formatter, "allow_abbrev": False}
        super().__init__(**(defaults | options))
        self.add_argument(
            "--version",
            action="version",
            version=versions(),
            help="print the versions of moe_ffn, torch and Python",
        )
        for flags, meaning in (
            (("-v", "--verbose"), "more"),
            (("-q", "--quiet"), "errors alone"),
        ):
            self.add_argument(
                *flags,
                action=SetLevel,
                nargs=0,
                dest=argparse.SUPPRESS,  # no value among those of the options
                default=argparse.SUPPRESS,
                help=f"log {meaning}",
            )

    def add_run(self) -> None:
        """Take the folder of a run as `run`, and whether its code may be run as `trust_code`."""
        self.add_argument(
            "run",
            type=Path,
            metavar="RUN",
            help="folder of a run, finished or interrupted, with a best checkpoint",
        )
        self.add_argument(trust.FLAG, action="store_true", help=trust.HELP)

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse a command line of fixed options alone.

        Raises:
            ConfigError: it has a mistake; an unknown flag is named first, with the one that is like it.
        """
        words = sys.argv[1:] if args is None else list(args)
        for word in takewhile("--".__ne__, words):
            flag = word.partition("=")[0]
            if re.fullmatch(r"-{1,2}[^\W\d][\w.-]*", flag) and flag not in (
                "-h",
                "-v",
                "-q",
                *self._flags,
            ):
                raise ConfigError(f"{flag}: unknown{nearest_or_all(flag, self._flags)}")
        return super().parse_args(words, namespace)

    def nearest_flag(self, typed: str) -> str:
        """`"; did you mean '--resume'?"` for `--resum`; the empty string where no flag is like it."""
        return did_you_mean(typed, self._flags, cutoff=0.8)

    @property
    def _flags(self) -> list[str]:
        """Long flags in the order of the help."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def error(self, message: str) -> Any:
        raise ConfigError(message.removeprefix("argument "))


class _Formatter(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return wrap(text, width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width).split("\n")


def versions() -> str:
    """`moe_ffn 0.2.0, torch 2.13.0, Python 3.11.4`."""
    found = {"moe_ffn": "(not installed)", "torch": ""}
    for package in found:
        try:
            found[package] = version(package)
        except PackageNotFoundError:  # run from a checkout that is not installed
            continue
    packages = ", ".join(f"{package} {number}" for package, number in found.items())
    return f"{packages}, Python {platform.python_version()}"


def check_output(option: str, path: Path, opening: str) -> None:
    """Check that `write_output` could write this file; write nothing.

    Args:
        opening: first characters of such a file. A file that begins otherwise is not overwritten.

    Raises:
        ConfigError: it could not, or another file would be lost.
    """
    try:
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        if path.exists() and not path.is_file():  # it would be replaced, /dev/null too
            raise ConfigError(f"{option}: '{path}' is no regular file; choose another file")
        if path.exists():
            with path.open("rb") as file:
                if file.read(len(opening)) not in (b"", opening.encode()):
                    raise ConfigError(
                        f"{option}: '{path}' exists and was not made by this program; choose another "
                        "file, or remove it"
                    )
        # Trying is the only test: root may write anywhere except in read-only file systems.
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


def _cannot_write(option: str, path: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{option}: '{path}' cannot be written ({reason(error)}); choose another file"
    )


_MIN_WIDTH = 30
"""Characters that the second of two columns needs."""


def wrap(text: str, width: int) -> str:
    """Wrap `text` with each long line continued below the beginning of its text.

    The text of a line in two columns (`  --name VALUE   meaning`) is the second column. Successive lines
    without indentation are one paragraph. A word longer than the width is not split.
    """
    paragraphs = re.sub(r"(?m)^(\S.*)\n(?=\S)", r"\1 ", text)
    return "\n".join(_wrap_line(line, width) for line in paragraphs.split("\n"))


def _wrap_line(line: str, width: int) -> str:
    columns = re.match(r"\s*\S.*?\s{2,}(?=\S)", line)
    indent = line[: len(line) - len(line.lstrip())]
    above, first = "", columns[0] if columns else indent
    text, hanging = line[len(first) :], " " * len(first)
    if columns and len(hanging) + _MIN_WIDTH > width:  # one column under the other
        above, first = f"{first.rstrip()}\n", f"{indent}    "
        hanging, width = first, max(width, len(first) + _MIN_WIDTH)
    return above + textwrap.fill(
        text,
        max(width, len(hanging) + 1),
        initial_indent=first,
        subsequent_indent=hanging,
        break_long_words=False,
        break_on_hyphens=False,
    )
