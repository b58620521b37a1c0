"""Shows which experts each token of a text goes to, layer by layer.

moe-ffn trace runs/NAME --text "import os" [--html FILE]
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from moe_ffn.cli.parser import Parser, check_output, whole_number, write_output
from moe_ffn.errors import ConfigError, command, reason
from moe_ffn.report.html import OPENING
from moe_ffn.report.trace import follow
from moe_ffn.report.trace_view import page, table
from moe_ffn.runs.folder import check_has_weights
from moe_ffn.trust import accepting_code


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=command("trace"), description=__doc__)
    parser.add_run()
    parser.add_argument("--text", required=True, help="the text; - reads standard input")
    parser.add_argument("--layers", help="these layers alone, as in 0,3")
    parser.add_argument("--html", type=Path, metavar="FILE", help="write a page too")
    given = parser.parse_args(argv)
    check_has_weights(given.run)
    layers = None if given.layers is None else parse_layers(given.layers)
    text = read_text(given.text)
    if given.html is not None:
        check_output("--html", given.html, OPENING)
    with accepting_code(given.trust_code):
        trace = follow(given.run, text, layers)
    if given.html is not None:
        write_output("--html", given.html, page(trace))
    console = Console(highlight=False)
    console.print(table(trace, console.width))
    if given.html is not None:
        print(f"\nwritten: {given.html}")
    return 0


def parse_layers(text: str) -> list[int]:
    """`0,3` as [0, 3]."""
    parts = [whole_number(part.strip()) for part in text.split(",")]
    layers = [part for part in parts if part is not None]
    if len(layers) < len(parts):
        raise ConfigError(
            f"--layers: must be numbers of layers with commas between them, as in 0,3, got '{text}'"
        )
    return layers


def read_text(given: str) -> bytes:
    """The bytes of `--text`; `-` stands for standard input."""
    # What is not UTF-8 in an argument comes as surrogates.
    text = _standard_input() if given == "-" else given.encode("utf-8", "surrogateescape")
    if not text:
        raise ConfigError("--text: is empty; give some text, as in --text 'import os'")
    return text


def _standard_input() -> bytes:
    try:
        return sys.stdin.buffer.read() if sys.stdin is not None else b""
    except OSError as error:
        raise ConfigError(f"--text: standard input cannot be read ({reason(error)})") from error
