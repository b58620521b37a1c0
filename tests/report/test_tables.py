"""Tables on the screen: the rows of a model are its total, a run's end shows only what was measured."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from moe_ffn.cli.command_line import parse_config
from moe_ffn.report.tables import load_table, model_table, print_results, unused_experts
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.json_files import Summary, plain_values
from moe_ffn.runs.train.ending import window_losses, write_summary

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


def measured(*load: float, dropped: float = 0.0) -> dict[str, Any]:
    return {"load": list(load), "max_violation": 1.5, "entropy": 0.25, "dropped_fraction": dropped}


def loads(*load: float, dropped: float = 0.0, width: int = 80) -> str:
    routing = measured(*load, dropped=dropped)
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(load_table({"layer_00": routing, "layer_01": routing}, width))
    _, header, rows = console.export_text().partition("layer ")
    return header + rows


def test_a_share_above_zero_is_never_shown_as_zero() -> None:
    assert loads(0.9, 0.0994, 0.0004, 0.0, dropped=0.0002) == (
        "layer     0     1     2     3  MaxVio  entropy  dropped\n"
        "    0  90.0   9.9  <0.1   0.0    1.50     0.25    <0.1%\n"
        "    1  90.0   9.9  <0.1   0.0    1.50     0.25    <0.1%\n"
    )


def test_experts_have_columns_as_far_as_they_fit() -> None:
    nine = [*[0.124] * 6, 0.2556, 0.0004, 0.0]

    assert loads(*[0.125] * 8).splitlines()[0] == (
        "layer     0     1     2     3     4     5     6     7  MaxVio  entropy  dropped"
    )
    assert loads(*nine, width=85).splitlines()[1] == (
        "    0  12.4  12.4  12.4  12.4  12.4  12.4  25.6  <0.1   0.0    1.50     0.25     0.0%"
    )
    assert loads(*nine, width=84) == (
        "layer  experts  busiest  median  idlest  unused  MaxVio  entropy  dropped\n"
        "    0        9  #6 25.6    12.4     0.0       1    1.50     0.25     0.0%\n"
        "    1        9  #6 25.6    12.4     0.0       1    1.50     0.25     0.0%\n"
    )


def test_a_small_even_share_has_a_digit_more() -> None:
    sixty_four = [1 / 64 + 0.001, *[1 / 64] * 62, 1 / 64 - 0.001]
    assert loads(*sixty_four).splitlines()[1] == (
        "    0       64  #0 1.66    1.56    1.46       0    1.50     0.25     0.0%"
    )


@pytest.mark.parametrize("num_experts", [8, 32, 64, 256])
def test_the_loads_of_any_model_fit_an_80_column_terminal(num_experts: int) -> None:
    routing = {
        name: measured(*[0.0] * (num_experts - 1), 1.0, dropped=0.5)
        for name in ("layer_00", "layer_11", "layer_11/inner")
    }
    console = Console(width=80, file=io.StringIO(), record=True)
    console.print(load_table(routing, 80))
    console.print(unused_experts(routing))
    shown = console.export_text()

    lines = shown.splitlines()
    assert max(map(len, lines)) <= 80
    assert "…" not in shown
    # The table's title, its head and three rows; a line and three for what is not used.
    assert len(lines) == 5 + 4
    assert "100.0" in lines[2]


def test_an_unmeasured_load_is_neither_used_nor_unused() -> None:
    nan = float("nan")

    assert unused_experts({}) == ""
    assert unused_experts({"layer_00": measured(0.5, 0.5)}) == (
        "every expert is used on the validation split"
    )
    assert unused_experts({"layer_00": measured(0.5, 0.5), "layer_01": measured(nan, nan)}) == (
        "experts without a token on the validation split\n  layer 1: not measured"
    )
    assert "-" in loads(*[nan] * 32).splitlines()[1]


def test_the_first_unused_experts_are_named() -> None:
    many = [0.0] * 64
    many[3], many[6] = 0.5, 0.5

    assert unused_experts(
        {
            "layer_00": measured(0.5, 0.5),
            "layer_01": measured(1.0, 0.0),
            "layer_02": measured(*many),
        }
    ) == (
        "experts without a token on the validation split\n"
        "  layer 1: 1 of 2 (1)\n"
        "  layer 2: 62 of 64 (0, 1, 2, 4, 5, 7, ...)"
    )


def shown(tmp_path: Path, not_judged: Sequence[str] = (), **replaced: Any) -> str:
    """The screen of a good run, with `replaced` fields."""
    summary: dict[str, Any] = {
        "validation_loss": 2.5,
        "validation_bits_per_byte": 3.6,
        "unigram_loss": 3.0,
        "ngram_loss": 2.6,
        "tokens_per_second": 1000.0,
        "num_tokens": 4000,
        "train_seconds": 4.0,
        "wall_seconds": 5.0,
        "peak_memory_bytes": 10**8,
        "window_losses": [],
        "num_alarms": 0,
        "num_skipped_steps": 0,
        "routing": {},
    }
    assert summary.keys() == Summary.model_fields.keys()
    callbacks: Any = SimpleNamespace(
        steps=SimpleNamespace(not_judged=lambda: not_judged),
        samples=SimpleNamespace(last="", prompt=""),
    )
    console = Console(width=80, file=io.StringIO(), record=True)
    print_results(console, tmp_path, summary | replaced, callbacks)
    return console.export_text()


def test_a_run_worse_than_the_unigram_model_is_reported(tmp_path: Path) -> None:
    said = (
        "\nworse than the unigram model, which only counts tokens: the run is too short or broken\n"
    )
    assert said in shown(tmp_path, validation_loss=3.0001)
    assert "worse than" not in shown(tmp_path, validation_loss=3.0)
    assert "worse than" not in shown(tmp_path, validation_loss=math.nan)
    assert "training has diverged" in shown(tmp_path, validation_loss=math.nan)


def test_rules_that_need_more_steps_are_listed(tmp_path: Path) -> None:
    too_short = "collapse, dropped pairs and dead experts need 50 steps, this run has 30"
    assert f"\nnot judged yet: {too_short}\n" in shown(tmp_path, not_judged=[too_short])
    assert "not judged" not in shown(tmp_path)


def test_the_screen_names_skipped_steps_and_alarms(tmp_path: Path) -> None:
    said = shown(tmp_path, num_skipped_steps=3)
    assert "skipped steps   3\n" in said
    assert "alarms" not in said.partition("\nResults in ")[0]
    said = shown(tmp_path, num_alarms=2)
    assert "alarms          2; see " in said
    assert "skipped steps" not in said


def test_a_summary_keeps_the_pairs_of_up_to_64_experts() -> None:
    kept = plain_values(
        {str(n): torch.full((n, n), 1 / 3) for n in (64, 65)} | {"load": torch.ones(65)}
    )
    assert [*kept] == ["64", "load"]
    assert kept["64"][0][0] == 0.3333
    assert plain_values([math.nan, torch.tensor(math.inf), 1.5]) == [None, None, 1.5]


def test_the_profile_of_an_earlier_part_of_a_run_is_not_kept(tmp_path: Path) -> None:
    samples = SimpleNamespace(last="", prompt="")
    for text in ("slow", ""):
        callbacks: Any = SimpleNamespace(samples=samples, profile=SimpleNamespace(text=text))
        write_summary(tmp_path, {"validation_loss": 2.5}, callbacks)
        assert (tmp_path / "profile.txt").exists() == bool(text)


def test_neighbouring_windows_are_one_where_there_are_very_many() -> None:
    assert window_losses(torch.tensor([0.5, 1.25, 2.0])) == [0.5, 1.25, 2.0]
    found = window_losses(torch.arange(2500.0))
    assert len(found) == 834
    assert found[:2] == [1.0, 4.0]
    assert found[-1] == 2499.0
