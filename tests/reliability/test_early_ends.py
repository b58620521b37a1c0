"""A run that its time or a loss that falls no more has ended goes on from there, once it may go further."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest

from moe_ffn.training.recovery.stopping import StepTimer
from tests.helpers.tiny_runs import losses, options, run_here

NO_TIME = "00:00:00:00"
STOPPING = "{patience: 1, min_delta: 9.0}"  # no loss falls by so much


def test_time_ends_a_run_between_two_steps() -> None:
    timer = StepTimer(NO_TIME)
    module: Any = None
    trainer: Any = SimpleNamespace(
        accumulate_grad_batches=3,
        should_stop=False,
        strategy=SimpleNamespace(broadcast=lambda value: value),
    )
    for index in range(2):
        timer.on_train_batch_end(trainer, module, None, {"index": index}, index)
        assert not trainer.should_stop
    timer.on_train_batch_end(trainer, module, None, {"index": 2}, 2)

    assert trainer.should_stop


@pytest.mark.slow
def test_a_run_that_time_ended_in_an_accumulation_window_goes_on(tmp_path: Path) -> None:
    elapsed = iter([0.0] * 8)  # at the fit's start and after each step but the last

    def time_elapsed(*_: Any) -> float:
        return next(elapsed, 1e9)

    argv = options(
        tmp_path,
        run__name="run",
        trainer__accumulate_grad_batches="3",
        trainer__max_time="01:00:00:00",
    )
    with patch.object(StepTimer, "time_elapsed", time_elapsed):
        done = run_here(*argv)
    folder = tmp_path / "runs" / "run"
    assert done.code == 0, done.stderr
    assert max(losses(folder)) < 12

    done = run_here("--resume", str(folder), "--trainer.max_steps", "14", "--trainer.max_time=null")

    assert done.code == 0, done.stderr
    assert "skipped" not in done.stdout
    assert max(losses(folder)) == 14


@pytest.mark.slow
def test_a_run_without_any_time_is_begun_once_it_has_some(tmp_path: Path) -> None:
    done = run_here(*options(tmp_path, run__name="run", trainer__max_time=NO_TIME))
    folder = tmp_path / "runs" / "run"
    assert done.code == 0, done.stderr

    done = run_here("--resume", str(folder), "--trainer.max_steps", "14", "--trainer.max_time=null")

    assert done.code == 0, done.stderr
    assert max(losses(folder)) == 14


@pytest.mark.parametrize(
    ("change", "step"),
    [
        pytest.param("--trainer.early_stopping=null", 14, id="the rule is given up"),
        pytest.param("--trainer.early_stopping.patience=2", 12, id="more patience"),
        pytest.param("--trainer.early_stopping.patience=1", 8, id="the same"),
    ],
)
@pytest.mark.slow
def test_early_stopping_is_that_of_the_options_which_a_run_goes_on_with(
    tmp_path: Path, change: str, step: int
) -> None:
    done = run_here(*options(tmp_path, run__name="run", trainer__early_stopping=STOPPING))
    folder = tmp_path / "runs" / "run"
    assert done.code == 0, done.stderr
    assert max(losses(folder)) == 8

    done = run_here("--resume", str(folder), "--trainer.max_steps", "14", change)

    assert done.code == 0, done.stderr
    assert "ckpt_path" not in done.stderr
    assert max(losses(folder)) == step
