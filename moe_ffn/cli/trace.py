"""Show which experts each token of a text goes to, layer by layer.

moe-ffn trace runs/NAME --text "import os" [--html FILE]

RUN may also be a model folder, or a sparse model of transformers with safetensors and tokenizer.json.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from moe_ffn.cli.parser import Parser, layer_numbers, page_file, text_from_flag, write_output
from moe_ffn.config.errors import command
from moe_ffn.ffn.base import layer_number
from moe_ffn.interop.live_models import is_transformers_folder, route_text
from moe_ffn.report.trace import (
    Prediction,
    TextTrace,
    trace_of,
    trace_text,
    visible,
    visits_by_layer,
)
from moe_ffn.report.trace_view import page, table
from moe_ffn.weights.open_model import open_model


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=command("trace"), description=__doc__)
    parser.add_run()
    parser.add("--text TEXT", "text to trace; - reads standard input", required=True)
    parser.add("--layers LAYERS", "only these layers, such as 0,3", type=layer_numbers)
    parser.add("--html FILE", "also write a page", type=page_file)
    args = parser.parse_args(argv)
    if is_transformers_folder(args.run):
        trace = _trace_transformers(args.run, text_from_flag(args.text), args.layers)
    else:
        model = open_model(args.run, trust_code=args.trust_code)
        text = text_from_flag(args.text)  # last, since it may wait for standard input
        trace = trace_text(args.run, model.decoder, model.tokenizer, text, args.layers)
    console = Console(highlight=False)
    console.print(table(trace, console.width))
    if args.html is not None:
        print()
        write_output("--html", args.html, page(trace))
    return 0


def _trace_transformers(folder: Path, text: bytes, layers: list[int] | None) -> TextTrace:
    routed = route_text(folder, text)
    sparse = {layer_number(name) for name in routed.routings}
    dense = {f"layer {n}": "dense" for n in range(routed.num_layers) if n not in sparse}
    return trace_of(
        folder,
        list(map(visible, routed.tokens)),
        routed.routings,
        visits_by_layer(routed.routings, []),
        [Prediction(visible(token), probability) for token, probability in routed.predictions],
        dense,
        {},
        layers,
    )
