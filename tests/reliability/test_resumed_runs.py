"""A run that is cut and resumed ends equal to the unbroken one, difference 0.0: losses, weights, optimizer,
router biases, metrics.
"""

from __future__ import annotations

import functools
import itertools
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from moe_ffn.training.recovery.stopping import StepTimer
from tests.helpers.cases import cases
from tests.helpers.cut import Crash, Cut, cutting
from tests.helpers.same_run import require_same
from tests.helpers.tiny_runs import lasting_folder, losses, options, run_here

MAX_STEPS = 14
"""Rows end at even steps, validations are at 4, 8, 12 and the end, and an epoch of the tiny corpus ends in
batch 9, which is that of step 10 without accumulation."""

_MOE = "type: moe, num_experts: 4, experts: {type: swiglu, dropout: DROPOUT}"
MODELS = {
    "dense": "{type: dense, dropout: DROPOUT}",
    "swiglu": "{type: swiglu, dropout: DROPOUT}",
    "moe with a capacity": f"{{{_MOE}, capacity: {{factor: 1.0}}}}",
    "dropless moe": f"{{{_MOE}}}",
    "noisy router": f"{{{_MOE}, router: noisy_top_k}}",
    "loss-free bias": f"{{{_MOE}, router: {{type: sigmoid_top_k, correction_bias: true}}}}",
}
PRECISIONS = [*((model, "32-true") for model in MODELS), ("dense", "bf16-mixed")]
CUTS = (
    Cut("asked to end between two rows", 3),
    Cut("asked to end in a validation", 8, within="validation_step"),
    Cut("asked to end where an epoch does", 10),
    Cut("asked to end in an accumulation window", 6),
    Cut("died in an accumulation window", 7, is_crash=True),
    Cut("died in the last validation", MAX_STEPS, is_crash=True, within="validation_step"),
)


def every_cut() -> Iterator[tuple[str, tuple[Any, ...]]]:
    for (model, precision), accumulate, dropout, cut in itertools.product(
        PRECISIONS, (1, 4), ("0.0", "0.1"), CUTS
    ):
        name = f"{model}, {precision}, accumulation {accumulate}, dropout {dropout}: {cut.name}"
        yield name, (model, precision, accumulate, dropout, cut)


QUICK = [
    f"loss-free bias, 32-true, accumulation 4, dropout 0.1: {how} in an accumulation window"
    for how in ("asked to end", "died")
]


@pytest.mark.parametrize(
    ("model", "precision", "accumulate", "dropout", "cut"), cases(every_cut(), QUICK)
)
def test_a_killed_run_resumes_to_the_same_result(
    tmp_path: Path, model: str, precision: str, accumulate: int, dropout: str, cut: Cut
) -> None:
    changes = changes_of(model, precision, accumulate, dropout)
    places = {"run__name": "cut", "run__output_dir": str(tmp_path)}
    train(*options(shared_folder(), **changes, **places), cut=cut)

    train("--resume", str(tmp_path / "cut"))

    require_same(unbroken(model, precision, accumulate, dropout), tmp_path / "cut")


def changes_of(model: str, precision: str, accumulate: int, dropout: str) -> dict[str, str]:
    return {
        "model__ffn": MODELS[model].replace("DROPOUT", dropout),
        "model__dropout": dropout,
        "data__batch_size": "16",
        "trainer__max_steps": str(MAX_STEPS),
        "trainer__accumulate_grad_batches": str(accumulate),
        "trainer__precision": precision,
    }


@functools.cache
def shared_folder() -> Path:
    return lasting_folder()


@functools.cache
def unbroken(*of: Any) -> Path:
    name = "-".join(map(str, of)).replace(" ", "-")
    train(*options(shared_folder(), run__name=name, **changes_of(*of)))
    return shared_folder() / "runs" / name


def train(*argv: str, cut: Cut | None = None) -> None:
    """Run the program in this process; it comes to its end, or to the cut."""
    try:
        with cutting(cut):
            done = run_here(*argv)
    except Crash:
        return
    assert cut is None or not cut.is_crash, f"did not die: {done.stdout[-500:]}"
    expected = 128 + signal.SIGTERM if cut else 0
    assert done.code == expected, f"exit code {done.code}: {done.stderr[-500:]}"


LAST = {"trainer__validate_every_n_steps": "4", "trainer__max_steps": "6"}
ENDS: dict[str, tuple[dict[str, str], Cut, int]] = {
    "asked to end in its last validation, which is outside of the fit": (
        LAST, Cut("asked", 6, within="validation_step"), 6
    ),
    "asked to end in the validation that decides to stop early": (
        {"trainer__validate_every_n_steps": "2", "trainer__early_stopping": "{patience: 1, min_delta: 9.0}"},
        Cut("asked", 4, within="validation_step"),
        4,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "cut", "last_step"), cases(ENDS, list(ENDS)[:1]))
def test_a_run_killed_at_its_end_resumes_to_the_same_result(
    tmp_path: Path, changes: dict[str, str], cut: Cut, last_step: int
) -> None:
    train(*options(tmp_path, run__name="whole", **changes))
    train(*options(tmp_path, run__name="cut", **changes), cut=cut)

    train("--resume", str(tmp_path / "runs/cut"))

    require_same(tmp_path / "runs/whole", tmp_path / "runs/cut")
    assert max(losses(tmp_path / "runs/cut")) == last_step


@pytest.mark.slow
def test_a_run_that_died_once_its_last_validation_was_written(tmp_path: Path) -> None:
    """The row and the text already exist and are not written twice."""
    train(*options(tmp_path, run__name="whole", **LAST))
    with patch("moe_ffn.runs.train.ending.summary_of", side_effect=Crash), pytest.raises(Crash):
        run_here(*options(tmp_path, run__name="cut", **LAST))

    train("--resume", str(tmp_path / "runs/cut"))

    require_same(tmp_path / "runs/whole", tmp_path / "runs/cut")


# -- runs that ended early by their own rules


def test_a_run_that_its_time_ended_in_an_accumulation_window_is_resumed(tmp_path: Path) -> None:
    elapsed = iter([0.0] * 8)  # at the start of the fit and after each step but the last
    accumulated = {"trainer__accumulate_grad_batches": "3"}
    train(*options(tmp_path, run__name="whole", **accumulated))
    limited = options(tmp_path, run__name="run", **accumulated, trainer__max_time="01:00:00:00")
    with patch.object(StepTimer, "time_elapsed", lambda *_: next(elapsed, 1e9)):
        train(*limited)
    assert max(losses(tmp_path / "runs/run")) < 12
    resume = ("--resume", str(tmp_path / "runs/run"))
    rejected = "is finished; change trainer.max_time, which ended it early, to train on, or"
    assert rejected in run_here(*resume, "--trainer.max_steps", "12").mistake
    longer = run_here(*resume, "--trainer.max_steps", "28")
    spent = "(01:00:00:00): the run has trained for 11574 days, 1:46:40 already; give more, or null"
    assert longer.code == 2
    assert longer.own_lines == [f"error: trainer.max_time {spent}"]

    train(*resume, "--trainer.max_time=null")

    whole, resumed = losses(tmp_path / "runs/whole"), losses(tmp_path / "runs/run")
    del whole[6]  # a row of two steps there, and of one here: the other ended early with its run
    assert whole.items() <= resumed.items()


@pytest.mark.parametrize(
    ("change", "step"),
    [
        pytest.param("--trainer.early_stopping=null", 14, id="without the rule"),
        pytest.param("--trainer.early_stopping.patience=2", 12, id="more patience"),
        pytest.param("--trainer.early_stopping.patience=1", 8, id="the same"),
    ],
)
@pytest.mark.slow
def test_a_resumed_run_stops_early_by_its_new_options(
    tmp_path: Path, change: str, step: int
) -> None:
    stopping = "{patience: 1, min_delta: 9.0}"  # no loss falls by so much
    train(*options(tmp_path, run__name="run", trainer__early_stopping=stopping))
    assert max(losses(tmp_path / "runs/run")) == 8

    train("--resume", str(tmp_path / "runs/run"), "--trainer.max_steps", "14", change)

    assert max(losses(tmp_path / "runs/run")) == step
