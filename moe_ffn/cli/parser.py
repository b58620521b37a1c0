"""Shared parts of all command lines: the parser, numbers, output files, tables, wrapped text."""

from __future__ import annotations

import argparse
import json
import math
import platform
import re
import sys
import tempfile
import textwrap
from collections.abc import Callable, Iterable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch

from moe_ffn.cli.exit import SetLevel
from moe_ffn.config import trust
from moe_ffn.config.base import MAX_COUNT
from moe_ffn.config.errors import ConfigError, explaining, nearest_or_all
from moe_ffn.config.files import write_atomically
from moe_ffn.report.html import OPENING


def whole_number(text: str, least: int = 0, most: int = MAX_COUNT) -> int | None:
    """Parse the digits 0 to 9 as a number; None if `text` is not a whole number within the limits."""
    number = int(text) if re.fullmatch(r"[0-9]{1,20}", text) else -1
    return number if least <= number <= most else None


def whole(least: int = 0, most: int = MAX_COUNT) -> Callable[[str], int]:
    """Return an argparse type for whole numbers from `least` to `most`."""

    def parse(text: str) -> int:
        number = whole_number(text, least, most)
        if number is None:
            raise argparse.ArgumentTypeError(
                f"must be a whole number from {least} to {most}, got '{text}'"
            )
        return number

    return parse


def positive(most: float = math.inf, unit: str = "") -> Callable[[str], float]:
    """Return an argparse type for finite numbers above 0 and up to `most`; `unit` is for its message."""

    def parse(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = 0.0
        if not (0 < number <= most and math.isfinite(number)):
            what = f"a number of {unit}" if unit else "a number"
            limit = "" if math.isinf(most) else f" and up to {most:g}"
            raise argparse.ArgumentTypeError(f"must be {what} above 0{limit}, got '{text}'")
        return number

    return parse


def layer_numbers(text: str) -> list[int]:
    """Parse `0,3` as [0, 3]; an argparse type."""
    layers: list[int] = []
    for part in text.split(","):
        layer = whole_number(part.strip())
        if layer is None:
            raise argparse.ArgumentTypeError(
                f"must be layer numbers separated by commas, such as 0,3, got '{text}'"
            )
        layers.append(layer)
    return layers


def whole_numbers(text: str) -> list[int]:
    """Parse `1,2,4` or `1..8` as numbers from 1; an argparse type."""
    numbers: list[int] = []
    for part in text.split(","):
        first, dots, last = part.partition("..")
        low = whole_number(first, 1)
        high = whole_number(last, 1) if dots else low
        if low is None or high is None or not 0 <= high - low < 1000:
            raise argparse.ArgumentTypeError(
                f"must be numbers from 1 or ascending ranges, such as 1..8 or 1,2,4, got '{text}'"
            )
        numbers += range(low, high + 1)
    return list(dict.fromkeys(numbers))


class Parser(argparse.ArgumentParser):
    """Parser with `--version`, `-v` and `-q` that raises ConfigError for a mistake and breaks no word."""

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
        for flags, shown in ((("-v", "--verbose"), "more"), (("-q", "--quiet"), "only errors")):
            self.add_argument(
                *flags,
                action=SetLevel,
                nargs=0,
                dest=argparse.SUPPRESS,  # adds no value to the parsed arguments
                default=argparse.SUPPRESS,
                help=f"log {shown}",
            )

    def add(self, option: str, meaning: str, **options: Any) -> None:
        """Add `--tokens N`, a switch `--trace`, or an argument `target TARGET`, with its line in the help.

        A value that is called FILE or FOLDER is a path. The other options are those of `add_argument`.
        """
        name, _, metavar = option.partition(" ")
        if not metavar:
            options = {"action": "store_true", **options}
        elif metavar in ("FILE", "FOLDER"):
            options = {"metavar": metavar, "type": Path, **options}
        else:
            options = {"metavar": metavar, **options}
        self.add_argument(name, help=meaning, **options)

    def add_run(self) -> None:
        """Add the arguments `run`, the folder of a run, and `trust_code`."""
        meaning = "folder of a run, finished or interrupted, with a best checkpoint"
        self.add("run RUN", meaning, type=Path)
        self.add_trust()

    def add_trust(self) -> None:
        self.add(trust.FLAG, trust.HELP)

    def add_device(self) -> None:
        default = "cuda" if torch.cuda.is_available() else "cpu"
        meaning = "cpu, cuda or cuda:1 (default: a GPU if there is one)"
        self.add("--device DEVICE", meaning, type=_available_device, default=default)

    def parse_args(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, args: Iterable[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parse a command line without dotted options.

        Raises ConfigError for a mistake; an unknown flag is reported first, with a similar flag.
        """
        words = sys.argv[1:] if args is None else list(args)
        for word in takewhile("--".__ne__, words):
            flag = word.partition("=")[0]
            looks_like_flag = re.fullmatch(r"-{1,2}[^\W\d][\w.-]*", flag)
            if looks_like_flag and flag not in ("-h", "-v", "-q", *self.flags):
                raise ConfigError(f"{flag}: unknown{nearest_or_all(flag, self.flags)}")
        return super().parse_args(words, namespace)

    @property
    def flags(self) -> list[str]:
        """Long flags in the order of the help."""
        return [flag for flag in self._option_string_actions if flag.startswith("--")]

    def error(self, message: str) -> Any:
        raise ConfigError(message.removeprefix("argument "))


class _Formatter(argparse.HelpFormatter):
    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return wrap(text, width)

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrap(" ".join(text.split()), width).split("\n")


def versions(*libraries: str) -> str:
    """Return `moe_ffn 0.2.0, torch 2.13.0, Python 3.11.4`, with further libraries after torch."""
    found = ", ".join(f"{name} {_version(name)}" for name in ("moe_ffn", "torch", *libraries))
    return f"{found}, Python {platform.python_version()}"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "(not installed)"


def _available_device(name: str) -> torch.device:
    try:
        empty = torch.empty(0, device=name)
        empty.tolist()  # fails on the meta device, which has no values
        return empty.device
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise argparse.ArgumentTypeError(
            f"'{name}' is not available; give cpu, or cuda on a machine with a GPU"
        ) from error


def check_output(path: Path, opening: str) -> None:
    """Check that `write_output` can write this file, without writing it.

    Raises ConfigError if it cannot be written, or exists with another beginning than `opening`.
    """
    with explaining(f"'{path}' cannot be written", "choose another file"):
        if path.is_dir():
            raise IsADirectoryError(21, "Is a directory")
        if path.exists() and not path.is_file():  # such as /dev/null, which would be replaced
            raise ConfigError(f"'{path}' is not a regular file; choose another file")
        if path.exists():
            with path.open("rb") as file:
                if file.read(len(opening)) not in (b"", opening.encode()):
                    raise ConfigError(
                        f"'{path}' exists and was not made by this program; choose another file, or "
                        "remove it"
                    )
        # Permission bits prove nothing: root may write anywhere except in a read-only file system.
        with tempfile.TemporaryFile(dir=path.parent):
            pass


def _output_file(opening: str, text: str) -> Path:
    try:
        check_output(Path(text), opening)
    except ConfigError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return Path(text)


page_file = partial(_output_file, OPENING)
json_file = partial(_output_file, "{")
"""Argparse types of a file to write; an existing file of another kind is a mistake."""


def write_json(path: Path, values: Any) -> None:
    """Write the plain values of `--json`; see `write_output`."""
    write_output("--json", path, json.dumps(values, indent=2) + "\n")


def write_output(option: str, path: Path, text: str, label: str = "written") -> None:
    """Write a file atomically and print its path; a ConfigError names the option if that fails."""
    with explaining(f"{option}: '{path}' cannot be written", "choose another file"):
        # A file name in the text may not be UTF-8.
        write_atomically(path, text.encode(errors="backslashreplace"))
    print(f"{label}: {path}")


def text_from_flag(argument: str) -> bytes:
    """Return the bytes of `--text`; `-` reads standard input."""
    if argument == "-":
        text = sys.stdin.buffer.read()
    else:  # Python decodes argument bytes that are not UTF-8 as surrogates
        text = argument.encode("utf-8", "surrogateescape")
    if not text:
        raise ConfigError("--text: is empty; give some text: --text 'import os'")
    return text


_MIN_WIDTH = 30
"""Minimum width of the second of two columns, in characters."""


def wrap(text: str, width: int) -> str:
    """Wrap `text`, and align the continuation of a long line with the start of its text.

    In a line of two columns (`  --name VALUE   meaning`) the text is the second column. Successive lines
    without indentation form one paragraph. A word longer than the width is not split.
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
