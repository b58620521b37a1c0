"""The model table adds up: its rows are the total, column by column. A load is never a false nothing."""

from __future__ import annotations

import io
from typing import Any

import pytest
import torch
from rich.console import Console

from experiments.command_line import parse_config
from experiments.config import TrainConfig
from experiments.tables import load_table, model_table

VOCAB_SIZE = 257
UNIT = {"k": 1e3, "M": 1e6, "G": 1e9}


def number(text: str) -> float:
    value, _, unit = text.strip().partition(" ")
    return float(value) * UNIT.get(unit, 1)


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--model.tie_embeddings", "false", "--model.ffn", "swiglu"],
        ["--model.positions", "learned", "--model.norm", "layer_norm", "--model.ffn", "dense"],
        ["--model.ffn_at", "{'0': dense, '2:': identity}", "--model.norm_placement", "post"],
    ],
    ids=["default", "untied", "learned positions", "pattern"],
)
def test_the_rows_add_up_to_the_total(options: list[str]) -> None:
    config: Any = parse_config(options, TrainConfig, command="train")
    table = model_table(config, VOCAB_SIZE)

    assert [column.header for column in table.columns][2:] == [
        "parameters",
        "active",
        "FLOPs/token",
    ]
    for column in table.columns[2:]:
        *rows, total = [number(str(cell)) for cell in column.cells]
        # Each cell is rounded to its second decimal.
        assert sum(rows) == pytest.approx(total, rel=0.01)


def test_the_table_fits_an_80_column_terminal() -> None:
    console = Console(width=80, file=io.StringIO(), record=True)
    config: Any = parse_config([], TrainConfig, command="train")
    console.print(model_table(config, VOCAB_SIZE))
    assert max(len(line) for line in console.export_text().splitlines()) <= 80


def loads(*load: float, dropped: float = 0.0) -> str:
    routing = {
        "load": torch.tensor(load),
        "max_violation": torch.tensor(1.5),
        "entropy": torch.tensor(0.25),
        "dropped_fraction": torch.tensor(dropped),
    }
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(load_table({"layer_00": routing, "layer_01": routing}))
    _, header, rows = console.export_text().partition("layer ")
    return header + rows


def test_a_share_above_zero_is_never_shown_as_zero() -> None:
    assert loads(0.9, 0.0994, 0.0004, 0.0, dropped=0.0002) == (
        "layer     0     1     2     3  MaxVio  entropy  dropped\n"
        "    0  90.0   9.9  <0.1   0.0    1.50     0.25    <0.1%\n"
        "    1  90.0   9.9  <0.1   0.0    1.50     0.25    <0.1%\n"
    )


def test_many_experts_stand_in_line() -> None:
    assert loads(*[0.124] * 6, 0.2556, 0.0004, 0.0).splitlines()[1] == (
        "    0  12.4 12.4 12.4 12.4 12.4 12.4 25.6 <0.1  0.0    1.50     0.25     0.0%"
    )
