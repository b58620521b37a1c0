"""What the display says of a run's health."""

from __future__ import annotations

import io
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fitted import Fitted
from rich.console import Console
from torch import Tensor

from moe_ffn.training.progress import ProgressBar, load_bars, routing_health, status


def values(load: list[float], **replaced: float) -> dict[str, Tensor]:
    healthy = {"max_violation": max(load) * len(load) - 1, "dropped_fraction": 0, "dead_experts": 0}
    scalars = {name: torch.tensor(value) for name, value in (healthy | replaced).items()}
    return {"load": torch.tensor(load), **scalars}


EVEN, ONE_HAS_ALL = values([0.25] * 4), values([1.0, 0.0, 0.0, 0.0], dead_experts=3)


def test_health_names_the_worst_layer_and_what_is_lost() -> None:
    assert routing_health({}) == []
    assert routing_health({"layer_00": EVEN}) == ["MaxVio 0.00 (layer 0)"]
    worse = values([0.25] * 4, dropped_fraction=0.125, dead_experts=1)
    assert routing_health({"layer_00": worse, "layer_07/inner": ONE_HAS_ALL}) == [
        "MaxVio 3.00 (layer 7 inner)",
        "dropped 12.5%",
        "dead experts 4",
    ]


def test_bars_are_half_full_at_the_even_share() -> None:
    # 1, 4, 2 and 1 eighths of the pairs: half, twice, one and a half times the even quarter.
    uneven = values([0.125, 0.5, 0.375, 0.0])
    assert load_bars({"layer_00": EVEN, "layer_11": uneven}) == "load  0 ▅▅▅▅  11 ▃█▇·"


def test_too_many_experts_have_no_bars() -> None:
    assert load_bars({"layer_00": values([1 / 64] * 64)}) == ""
    assert load_bars({}) == ""


def test_the_status_is_of_the_newest_row(fit: Callable[..., Fitted]) -> None:
    steps = fit(model={"ffn": {"type": "moe", "num_experts": 4}}).watchers.steps

    loss = steps.last_row["train/loss"]
    text = status(steps)
    assert text.startswith(f"loss {loss:.3f}  MaxVio ")
    assert text.endswith(f" {steps.tokens_per_second:,.0f} tokens/s")


def test_a_dense_run_has_no_routing_to_show(fit: Callable[..., Fitted]) -> None:
    steps = fit(model={"ffn": "dense"}).watchers.steps

    assert "MaxVio" not in status(steps)
    assert load_bars(steps.last_routing) == ""


def test_the_bar_shows_load_under_it_in_a_terminal(
    fit: Callable[..., Fitted], monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = fit(model={"ffn": {"type": "moe", "num_experts": 4}}).watchers.steps
    screen = io.StringIO()
    made: list[Any] = []

    def terminal(**_: Any) -> Console:
        made.append(Console(file=screen, force_terminal=True, width=80))
        return made[-1]

    monkeypatch.setattr("rich.console.Console", terminal)
    bar = ProgressBar(steps)
    trainer: Any = SimpleNamespace(is_global_zero=True, max_steps=6, global_step=6)
    module: Any = None

    bar.on_train_start(trainer, module)
    bar.on_train_batch_end(trainer)
    bar.on_train_end(trainer, module)

    assert "MaxVio" in screen.getvalue()
    assert load_bars(steps.last_routing) in screen.getvalue()
