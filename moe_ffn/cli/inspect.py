"""Show what the feed-forward blocks of a run store: hidden units as key-value memories, and the tokens that
each expert processes.

moe-ffn inspect runs/NAME [--layers 0,3] [--tokens N] [--output FILE]
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from moe_ffn.cli.parser import Parser, check_output, layer_numbers, whole, write_output
from moe_ffn.config.errors import command
from moe_ffn.report.html import OPENING
from moe_ffn.report.inspect.inspection import inspect_run
from moe_ffn.report.inspect.text import text_of_file, text_of_run
from moe_ffn.runs.folder import check_has_weights
from moe_ffn.runs.reader import load_run

PAGE = "inspect.html"


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=command("inspect"), description=__doc__)
    parser.add_run()
    parser.add_argument("--layers", type=layer_numbers, help="only these layers, such as 0,3")
    parser.add_argument(
        "--tokens",
        type=whole(1, 10**9),
        default=65_536,
        metavar="N",
        help="number of validation tokens to read, in whole sequences (default: %(default)s)",
    )
    parser.add_argument(
        "--text", type=Path, metavar="FILE", help="read this text instead of the validation split"
    )
    parser.add_argument(
        "--output", type=Path, metavar="FILE", help=f"page to write (default: {PAGE} in the run)"
    )
    args = parser.parse_args(argv)
    check_has_weights(args.run)
    output = args.output or args.run / PAGE
    check_output("--output", output, OPENING)
    run = load_run(args.run, trust_code=args.trust_code)
    if args.text is None:
        text = text_of_run(run, args.tokens)
    else:
        text = text_of_file(run, args.text, args.tokens)
    inspection = inspect_run(run, text, args.layers)
    # Imported here, so that a mistake in the options is reported before plotly loads.
    from moe_ffn.report.inspect.page import PageParts, inspection_html
    from moe_ffn.report.plots import shared_script

    write_output("--output", output, inspection_html(inspection, run, shared_script(output)))
    console = Console(highlight=False, soft_wrap=False)
    parts = PageParts(inspection)
    for sentence in (*parts.findings(), *parts.absent()):
        console.print(sentence, markup=False)
    print(f"written: {output}")
    return 0
