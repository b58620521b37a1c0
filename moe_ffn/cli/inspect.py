"""Show what the feed-forward blocks of a run store: hidden units as key-value memories, and the tokens that
each expert processes.

moe-ffn inspect runs/NAME [--layers 0,3] [--tokens N] [--output FILE]
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console

from moe_ffn.cli.parser import Parser, check_output, layer_numbers, page_file, whole, write_output
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
    parser.add("--layers LAYERS", "only these layers, such as 0,3", type=layer_numbers)
    parser.add(
        "--tokens N",
        "number of validation tokens to read, in whole sequences (default: %(default)s)",
        type=whole(1, 10**9),
        default=65_536,
    )
    parser.add("--text FILE", "read this text instead of the validation split")
    parser.add("--output FILE", f"page to write (default: {PAGE} in the run)", type=page_file)
    args = parser.parse_args(argv)
    check_has_weights(args.run)
    output = args.output or args.run / PAGE
    check_output(output, OPENING)
    run = load_run(args.run, trust_code=args.trust_code)
    text = text_of_file(run, args.text, args.tokens) if args.text else text_of_run(run, args.tokens)
    inspection = inspect_run(run, text, args.layers)
    # Imported here, so that a mistake in the options is reported before plotly loads.
    from moe_ffn.report.inspect.page import absent, findings, inspection_html
    from moe_ffn.report.plots import shared_script

    html = inspection_html(inspection, run, shared_script(output))
    console = Console(highlight=False, soft_wrap=False)
    for sentence in (*findings(inspection), *absent(inspection)):
        console.print(sentence, markup=False)
    write_output("--output", output, html)
    return 0
