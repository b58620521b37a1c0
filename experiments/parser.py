"""The parser of a command line with a few fixed options; options by path: `experiments.command_line`."""

from __future__ import annotations

import argparse
from typing import Any

from experiments.versions import versions
from experiments.wrapping import wrap
from moe_ffn.errors import ConfigError

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
