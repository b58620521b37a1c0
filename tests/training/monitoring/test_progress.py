"""The display of a run's progress, validations and health."""

from __future__ import annotations

import io
import re
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from rich.console import Console
from torch import Tensor

from moe_ffn.runs.assemble import make_token_data
from moe_ffn.training.monitoring import progress
from moe_ffn.training.monitoring.progress import ProgressBar, ProgressLines, routing_health, status
from tests.helpers.fitted import Fit, Fitted


def values(load: list[float], **replaced: float) -> dict[str, Tensor]:
    healthy = {"max_violation": max(load) * len(load) - 1, "dropped_fraction": 0, "dead_experts": 0}
    scalars = {name: torch.tensor(value) for name, value in (healthy | replaced).items()}
    return {"load": torch.tensor(load), **scalars}


EVEN, ONE_HAS_ALL = values([0.25] * 4), values([1.0, 0.0, 0.0, 0.0], dead_experts=3)


def test_health_names_the_worst_layer_drops_and_dead_experts() -> None:
    assert routing_health({}) == []
    assert routing_health({"layer_00": EVEN}) == ["MaxVio 0.00 (layer 0)"]
    worse = values([0.25] * 4, dropped_fraction=0.125, dead_experts=1)
    assert routing_health({"layer_00": worse, "layer_07/inner": ONE_HAS_ALL}) == [
        "MaxVio 3.00 (layer 7 inner)",
        "dropped 12.5%",
        "dead experts 4",
    ]


def test_layers_without_loads_are_ranked_by_used_experts() -> None:
    routing = {
        f"layer_{n:02d}": {
            "experts_used": torch.tensor(used),
            "dropped_fraction": torch.tensor(0.0),
        }
        for n, used in enumerate((0.75, 0.25, 0.5))
    }
    assert routing_health(routing) == ["experts used 25.0% (layer 1)"]


def test_the_status_is_of_the_newest_row(moe_fit: Fitted) -> None:
    steps = moe_fit.watchers.steps
    loss = steps.last_row["train/loss"]
    text = "  ".join(status(steps))
    assert text.startswith(f"loss {loss:.3f}  MaxVio ")
    assert text.endswith(f" {steps.tokens_per_second:,.0f} tokens/s")
    assert "  ".join(status(steps, steps.last_row_step)) == text
    assert status(steps, 99)[0] == f"loss {loss:.3f} (step {steps.last_row_step})"


def terminal(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    """Redirect the display to an 80-column terminal and return its text."""
    screen = io.StringIO()
    made = Console(file=screen, force_terminal=True, width=80)
    monkeypatch.setattr(progress, "Console", lambda **_: made)
    return screen


def test_the_bar_shows_the_routing_and_a_frame_between_rows_reads_no_statistics(
    moe_fit: Fitted, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Frames are drawn by a thread of rich, for which statistics on a GPU would have to be waited for."""
    screen = terminal(monkeypatch)
    bar = ProgressBar(moe_fit.watchers.steps, moe_fit.watchers.validation)
    trainer: Any = SimpleNamespace(is_global_zero=True, max_steps=6, global_step=6)
    module: Any = None
    bar.on_train_start(trainer, module)
    bar.on_train_batch_end(trainer)

    monkeypatch.setattr(progress, "status", lambda *_: pytest.fail("statistics were read"))
    bar._live.refresh()
    bar.on_train_end(trainer, module)

    assert "MaxVio" in screen.getvalue()


class Frames(Callback):
    """Text of the bar after each batch and at the end of each validation, without colours."""

    def __init__(self, screen: io.StringIO) -> None:
        self.screen = screen
        self.seen: list[str] = []

    def look(self, trainer: Any, *args: Any, **kwargs: Any) -> None:
        (bar,) = (callback for callback in trainer.callbacks if isinstance(callback, ProgressBar))
        if bar._live.is_started:
            self.screen.seek(0)
            self.screen.truncate()
            bar._live.refresh()
            self.seen.append(re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", self.screen.getvalue()))

    on_train_batch_end = on_validation_batch_end = on_validation_end = look


@pytest.mark.parametrize("validate_every", [3, 100], ids=["in the fit", "after the fit"])
def test_the_bar_shows_a_validation_and_keeps_its_loss(
    fit: Fit, monkeypatch: pytest.MonkeyPatch, validate_every: int
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    frames = Frames(terminal(monkeypatch))
    done = fit(
        frames,
        model={"ffn": {"type": "moe", "num_experts": 32}},
        trainer={"validate_every_n_steps": validate_every, "max_steps": 4},
    )
    if validate_every == 100:
        frames.seen.clear()
        done.trainer.validate(done.module, datamodule=make_token_data(done.config, done.data))

    loss = done.watchers.validation.last["loss"]
    validating = [frame for frame in frames.seen if "validating" in frame]
    if validate_every == 100:
        assert len(validating) == len(frames.seen) == 2
        assert "training" not in validating[0]
    else:
        # Three steps, two batches, the end of the validation, and a step.
        assert ["validating" in frame for frame in frames.seen] == [False] * 3 + [True] * 2 + [
            False
        ] * 2
        assert "3/4" in validating[0]
        shown = " ".join(frames.seen[-1].split())
        assert f"validation loss {loss:.3f} (step 3)" in shown
    assert "1/2" in validating[0]
    assert "2/2" in validating[1]
    assert all(len(line) <= 80 for frame in frames.seen for line in frame.splitlines())


def test_the_time_left_leaves_out_the_first_step(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    now = 0.0
    monkeypatch.setattr(progress, "time", SimpleNamespace(monotonic=lambda: now))
    steps: Any = SimpleNamespace(last_row={})
    validation: Any = None
    lines = ProgressLines(steps, validation)
    trainer: Any = SimpleNamespace(is_global_zero=True, max_steps=10, global_step=4)
    module: Any = None

    lines.on_train_start(trainer, module)  # resumed after step 4
    for seconds, step in ((63, 5), (20, 6), (40, 7), (20, 8), (20, 10)):
        now, trainer.global_step = now + seconds, step
        lines.on_train_batch_end(trainer)

    assert capsys.readouterr().err.splitlines() == [
        "step 5/10",
        "step 6/10  80 s left",
        "step 7/10  90 s left",
        "step 8/10  53 s left",
        "step 10/10",
    ]


def validation_lines(text: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith("validation at ")]


def test_without_a_terminal_each_validation_has_a_line_with_its_loss(
    fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    done = fit(trainer={"validate_every_n_steps": 4, "max_steps": 6})
    losses = [row["validation/loss"] for _, row in done.logger.named("validation")]
    assert validation_lines(capsys.readouterr().err) == [
        f"validation at step 4: loss {losses[0]:.4f}"
    ]

    done.trainer.validate(done.module, datamodule=make_token_data(done.config, done.data))

    losses = [row["validation/loss"] for _, row in done.logger.named("validation")]
    assert validation_lines(capsys.readouterr().err) == [
        f"validation at step 6: loss {losses[1]:.4f}"
    ]
