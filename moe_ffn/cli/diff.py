"""Compare two models on a text: tensors, predictions, and the experts of each token.

    moe-ffn diff runs/a runs/b --text FILE
    moe-ffn diff models/qwen models/qwen --dtype-b bfloat16 --text FILE
    moe-ffn diff models/qwen adapters/mine --text FILE --json FILE

A and B are versions of one model: runs, model folders of moe_ffn or of transformers, or a model and an
adapter of peft for it. B also computes with the experts of A, which shows how much of the difference is
routing.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from moe_ffn.cli.parser import Parser, json_file, whole, write_json
from moe_ffn.config.errors import command
from moe_ffn.config.numbers import counted
from moe_ffn.ffn.base import short_name
from moe_ffn.interop.diff import DTYPE_FLAGS, ModelDifference, diff, two_digits
from moe_ffn.report.tables import plain_table
from moe_ffn.runs.json_files import plain_values
from moe_ffn.runs.texts import read_text_bytes

BYTES_PER_TOKEN = 64
"""Bytes of text that are read for each token, so that a large file is not encoded as a whole."""

MAX_TENSORS = 10
"""Maximum number of tensors in the table."""


def main(argv: Sequence[str]) -> int:
    options = vars(_parser().parse_args(argv or ["--help"]))
    json_path, text_path = options.pop("json"), options.pop("text")
    limit = None if options["recorded"] else BYTES_PER_TOKEN * options["num_tokens"]
    difference = diff(text=_read(text_path, limit), **options)
    print_difference(Console(highlight=False), difference)
    if json_path is not None:
        print()
        write_json(json_path, plain_values(difference.to_dict()))
    return 0


def _read(path: Path, limit: int | None) -> bytes:
    """Read a text, or as many of its lines as fit into `limit` bytes; of a longer line, whole characters."""
    text = read_text_bytes(path, limit)
    _, complete = codecs.utf_8_decode(text, "replace", False)  # without a character that was cut
    return text[: text.rfind(b"\n") + 1 or complete] if len(text) == limit else text


def _parser() -> Parser:
    parser = Parser(prog=command("diff"), description=__doc__)
    for name, meaning in (("a", "the reference"), ("b", "the model to compare with it")):
        parser.add(f"{name} {name.upper()}", f"folder of {meaning}", type=Path)
    parser.add("--text FILE", "text that both models read", required=True)
    for side in "ab":
        meaning = (
            f"compute {side.upper()} in {', '.join(DTYPE_FLAGS)} (default: the dtype of its files)"
        )
        parser.add(f"--dtype-{side} DTYPE", meaning)
    for side in "ab":
        parser.add(
            f"--experts-{side} NAME",
            f"implementation of the experts of {side.upper()}: eager, batched_mm, grouped_mm or moe_ffn "
            "for transformers; loop, cpu, grouped_mm or triton for models of moe_ffn",
        )
    parser.add(
        "--recorded FILE",
        "experts that vLLM or SGLang recorded for this text (.npz), instead of the experts of A",
    )
    parser.add(
        "--tokens N",
        "maximum number of tokens to read, from the beginning (default: %(default)s)",
        dest="num_tokens",
        type=whole(1, 10**9),
        default=4096,
    )
    meaning = "tokens of a sequence (default: as many as the models accept, at most 512)"
    parser.add("--window N", meaning, type=whole(1))
    parser.add_device()
    parser.add("--json FILE", "also write the results to a JSON file", type=json_file)
    parser.add_trust()
    return parser


def print_difference(console: Console, difference: ModelDifference) -> None:
    """Print the verdict, then tables of layers, positions and tensors."""
    console.print(difference.verdict, markup=False)
    for note in difference.notes:
        console.print(f"Note: {note}.", markup=False)
    num_windows = difference.num_tokens // difference.window
    console.print(
        f"\nA {difference.a}\nB {difference.b}\n{difference.num_tokens:,} tokens of text in "
        f"{counted(num_windows, 'window')} of {difference.window}",
        markup=False,
        soft_wrap=True,
    )
    tables = (_layers(difference), _positions(difference), _tensors(difference))
    for table in tables:
        if table.row_count:
            console.print()
            console.print(table)
    if (more := len(difference.tensors) - MAX_TENSORS) > 0:
        console.print(f"and {more} more tensors; --json lists them")
    for side, names in (("A", difference.only_a), ("B", difference.only_b)):
        if names:
            shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
            console.print(f"\nonly in {side}: {shown}", markup=False)


def _layers(difference: ModelDifference) -> Table:
    table = plain_table(["layer", "tokens that change experts"], num_texts=0)
    for name, share in difference.flips.items():
        table.add_row(short_name(name), f"{share:.2%}")
    return table


def _positions(difference: ModelDifference) -> Table:
    columns = ["position", "tokens", "KL", "KL with A's experts", "largest logit"]
    if difference.recorded:
        columns[3] = "KL with the record"
    if difference.kl_replayed is None:
        del columns[3]
    table = plain_table(columns, num_texts=0)
    for part in difference.positions:
        numbers = [part.kl, part.kl_replayed, part.largest_logit]
        cells = [two_digits(number) for number in numbers if number is not None]
        table.add_row(f"{part.first}-{part.last}", f"{part.num_tokens:,}", *cells)
    return table


def _tensors(difference: ModelDifference) -> Table:
    table = plain_table(["tensor", "largest", "relative", "rows"])
    for tensor in difference.tensors[:MAX_TENSORS]:
        rows = f"{tensor.rows:,} of {tensor.num_rows:,}"
        table.add_row(tensor.name, two_digits(tensor.largest), tensor.share, rows)
    return table
