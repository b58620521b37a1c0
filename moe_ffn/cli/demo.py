"""Show where each token of a short text goes, with a small trained model that comes with this package.

    moe-ffn demo --text "int size; /* the size */"

The experts of each token are printed, layer by layer, and written as a page. This needs no training and no
download.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich.console import Console

from moe_ffn.cli.parser import Parser, page_file, text_from_flag, write_output
from moe_ffn.config.errors import ConfigError, command
from moe_ffn.report.trace import trace_text
from moe_ffn.report.trace_view import page, table
from moe_ffn.weights.open_model import open_model

MODEL = Path(__file__).parent / "demo_model"
"""Model folder; its README.md is the card of the model."""

TEXT = """/* The caller must hold the lock. */
static int get_count(struct node *node)
{
	return node->count;
}
"""

INTRO = (
    "A small language model, trained on the source code and documentation of Linux, reads a text. Each row "
    "is a token. In each layer, a router sends it to 2 of 8 experts: 2 .62 is expert 2 with weight 0.62. "
    "A colour stands for an expert, so tokens of the same colour in a column share an expert."
)

NEXT = f"""To go further:
  {command("train")} --run.name my-run                train your own, in minutes
  {command("trace")} runs/my-run --text "import os"   trace it
  {command("report")} runs/my-run runs/dense          compare blocks, after
      {command("train")} --run.name dense --model.ffn.type dense"""


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=command("demo"), description=__doc__)
    meaning = "text to trace (default: a few lines of C); - reads standard input"
    parser.add("--text TEXT", meaning, default=TEXT)
    parser.add(
        "--output FILE",
        "page to write (default: demo.html); only a page of moe_ffn is overwritten",
        type=page_file,
        default="demo.html",
    )
    args = parser.parse_args(argv)
    text = text_from_flag(args.text)
    if not text.strip():
        raise ConfigError("--text: has only white space; give some text: --text 'import os'")
    model = open_model(MODEL)
    trace = trace_text(MODEL, model.decoder, model.tokenizer, text)
    # Without the predictions, all layers fit into a terminal of 80 columns.
    trace = replace(trace, tokens=tuple(replace(t, prediction=None) for t in trace.tokens))
    console = Console(highlight=False, markup=False)
    console.print(f"{INTRO}\n")
    console.print(table(trace, console.width))
    print()
    write_output("--output", args.output, page(trace, INTRO), "The same as a page")
    print(f"\n{NEXT}")
    return 0
