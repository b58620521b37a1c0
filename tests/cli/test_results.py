"""What a run's end says on the screen: only what was measured, and that it is bad where it is."""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console

from moe_ffn.cli.results import plain_values, print_results, window_losses, write_summary
from moe_ffn.runs.json_files import Summary


def shown(tmp_path: Path, not_judged: Sequence[str] = (), **replaced: Any) -> str:
    """The screen of a good run, unless `replaced` says otherwise."""
    summary: dict[str, Any] = {
        "validation_loss": 2.5,
        "validation_bits_per_byte": 3.6,
        "unigram_loss": 3.0,
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


def test_a_run_worse_than_the_unigram_model_is_told_so(tmp_path: Path) -> None:
    said = (
        "\nworse than the unigram model, which only counts tokens: the run is too short or broken\n"
    )
    assert said in shown(tmp_path, validation_loss=3.0001)
    assert "worse than" not in shown(tmp_path, validation_loss=3.0)
    assert "worse than" not in shown(tmp_path, validation_loss=math.nan)
    assert "training has diverged" in shown(tmp_path, validation_loss=math.nan)


def test_what_could_not_be_judged_is_said(tmp_path: Path) -> None:
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
