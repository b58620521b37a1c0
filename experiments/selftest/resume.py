"""A run that was cut and resumed is the unbroken run, to the bit."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

from experiments.selftest.case import Case, Chapter
from experiments.selftest.same_run import require_same
from experiments.selftest.scene import (
    finish,
    lasting_folder,
    options,
    run,
    run_here,
    start,
    wait_for_row,
)
from moe_ffn.runs.folder import METRICS_FILE

MAX_STEPS, VALIDATE_EVERY, BATCH_SIZE = 14, 4, 16
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
PRECISIONS = {"": "32-true", " in bf16": "bf16-mixed"}


class Crash(Exception):  # noqa: N818 - made by the test, not by the program
    """The process dies here, as far as the run can tell."""


@dataclass(frozen=True)
class Cut:
    """Where a run ends before its time."""

    name: str
    step: int
    """The optimizer step it happens in, counted from 1."""
    is_crash: bool = False
    """Whether nothing can be saved any more; otherwise SIGTERM asks the run to end."""
    within: str = "training_step"
    """The method of LanguageModel in which it happens."""

    def happen(self) -> None:
        if self.is_crash:
            raise Crash
        signal.raise_signal(signal.SIGTERM)


CUTS = (
    Cut("asked to end between two rows", 3),
    Cut("asked to end in a validation", 8, within="validation_step"),
    Cut("asked to end where an epoch does", 10),
    Cut("asked to end in an accumulation window", 6),
    Cut("died in an accumulation window", 7, is_crash=True),
    Cut("died in the last validation", MAX_STEPS, is_crash=True, within="validation_step"),
)


def cases() -> Iterator[Case]:
    scenes = [
        (f"{model}{suffix}", ffn, precision)
        for suffix, precision in PRECISIONS.items()
        for model, ffn in MODELS.items()
        if precision == "32-true" or model == "dense"
    ]
    for (model, ffn, precision), accumulate, dropout, cut in itertools.product(
        scenes, (1, 4), ("0.0", "0.1"), CUTS
    ):
        yield Case(
            f"{model}, accumulation {accumulate}, dropout {dropout}: {cut.name}",
            functools.partial(_resumes, ffn, precision, accumulate, dropout, cut),
            short=(model, accumulate, dropout) == ("loss-free bias", 4, "0.1")
            and "accumulation" in cut.name,
        )
    yield Case("died once its last validation was written", _died_after_the_last_validation)
    yield Case("asked to end in its last validation", _asked_in_the_last_validation, short=True)
    yield Case("asked to end where it stops early", _asked_where_it_stops_early, short=True)
    yield Case("two ranks, resumed as one: the data keep their order", _from_two_ranks_to_one)


CHAPTER = Chapter(
    "resume",
    "A run that is cut and resumed ends equal to the unbroken one, difference 0.0: losses, weights, "
    "optimizer, router biases, metrics.",
    cases,
)


def _resumes(
    ffn: str, precision: str, accumulate: int, dropout: str, cut: Cut, folder: Path
) -> None:
    argv = _argv(ffn, precision, accumulate, dropout)
    _train([*options(folder, **{"run.name": "cut", "run.output_dir": str(folder)}), *argv], cut)
    _train(["--resume", str(folder / "cut")])
    require_same(_unbroken(ffn, precision, accumulate, dropout), folder / "cut")


def _argv(ffn: str, precision: str, accumulate: int, dropout: str) -> list[str]:
    given = {
        "model.ffn": ffn.replace("DROPOUT", dropout),
        "model.dropout": dropout,
        "data.batch_size": str(BATCH_SIZE),
        "data.cache_dir": str(_data_cache()),
        "trainer.max_steps": str(MAX_STEPS),
        "trainer.validate_every_n_steps": str(VALIDATE_EVERY),
        "trainer.accumulate_grad_batches": str(accumulate),
        "trainer.precision": precision,
    }
    return [part for key, value in given.items() for part in (f"--{key}", value)]


@functools.cache
def _unbroken(ffn: str, precision: str, accumulate: int, dropout: str) -> Path:
    """The folder of the run that nothing happened to."""
    folder = lasting_folder()
    changes = {"run.name": "unbroken", "run.output_dir": str(folder)}
    _train([*options(folder, **changes), *_argv(ffn, precision, accumulate, dropout)])
    return folder / "unbroken"


@functools.cache
def _data_cache() -> Path:
    """Of all the runs, whose corpus is the same."""
    return lasting_folder()


def _train(argv: list[str], cut: Cut | None = None) -> None:
    """Run the program in this process; it comes to its end, or to the cut."""
    try:
        with cutting(cut):
            done = run_here(*argv)
    except Crash:
        return
    assert cut is None or not cut.is_crash, f"did not die: {done.stdout[-500:]}"
    expected = 128 + signal.SIGTERM if cut else 0
    assert done.code == expected, f"exit code {done.code}: {done.stderr[-500:]}"


@contextlib.contextmanager
def cutting(cut: Cut | None) -> Iterator[None]:
    """Within, the cut happens in the middle of its step, or of the validation after it."""
    if cut is None:
        yield
        return
    from moe_ffn.training.module import LanguageModel

    original: Callable[..., Any] = getattr(LanguageModel, cut.within)
    in_training = cut.within == "training_step"

    def step(self: Any, batch: Any, batch_idx: int) -> Any:
        accumulate = self.trainer.accumulate_grad_batches
        is_the_batch = batch_idx % accumulate == accumulate // 2 if in_training else batch_idx == 0
        if is_the_batch and self.trainer.global_step == cut.step - in_training:
            cut.happen()
        return original(self, batch, batch_idx)

    with patch.object(LanguageModel, cut.within, step):
        yield


def _died_after_the_last_validation(folder: Path) -> None:
    """Its row and its text are there already, and are written once."""
    changes = {"trainer__validate_every_n_steps": "4", "trainer__max_steps": "6"}
    _train(options(folder, run__name="whole", **changes))
    argv = options(folder, run__name="cut", **changes)
    with patch("moe_ffn.cli.training_run.make_results", side_effect=Crash):
        _train(argv, Cut("died", 0, is_crash=True))
    _train(["--resume", str(folder / "runs/cut")])
    require_same(folder / "runs/whole", folder / "runs/cut")


def _asked_in_the_last_validation(folder: Path) -> None:
    """It comes after the last step, outside of the fit."""
    changes = {"trainer__validate_every_n_steps": "4", "trainer__max_steps": "6"}
    _train(options(folder, run__name="whole", **changes))
    cut = Cut("asked", 6, within="validation_step")
    _train(options(folder, run__name="cut", **changes), cut)
    _train(["--resume", str(folder / "runs/cut")])
    require_same(folder / "runs/whole", folder / "runs/cut")


def _asked_where_it_stops_early(folder: Path) -> str:
    """A run that stops early ends there too when it is cut in the validation that decides so."""
    changes = {
        "trainer__validate_every_n_steps": "2",
        "trainer__early_stopping": "{patience: 1, min_delta: 9.0}",
    }
    _train(options(folder, run__name="whole", **changes))
    cut = Cut("asked", 4, within="validation_step")
    _train(options(folder, run__name="cut", **changes), cut)
    _train(["--resume", str(folder / "runs/cut")])
    require_same(folder / "runs/whole", folder / "runs/cut")
    last = max(int(step) for step in _losses(folder / "runs/cut"))
    assert last == 4, f"stopped at step {last}"
    return f"stopped at step {last}"


def _from_two_ranks_to_one(folder: Path) -> str:
    """The losses are those of one rank alone, but for the order in which ranks add up."""
    changes = {"model__ffn": "dense", "trainer__max_steps": "40"}
    assert (one := run(*options(folder, run__name="one", **changes))).code == 0, one.stderr
    ranks = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
    process = start(*options(folder, run__name="two", **changes), *ranks)
    wait_for_row(folder / "runs/two", 10, process)
    process.send_signal(signal.SIGTERM)
    two = finish(process)
    assert two.code == 128 + signal.SIGTERM, f"exit code {two.code}: {two.stderr}"
    alone = ("--trainer.devices", "1", "--trainer.strategy", "auto")
    resumed = run("--resume", str(folder / "runs/two"), *alone)
    assert resumed.code == 0, resumed.stderr
    losses, expected = (_losses(folder / "runs" / name) for name in ("two", "one"))
    assert losses.keys() == expected.keys(), "rows at other steps"
    farthest = max(abs(losses[step] / expected[step] - 1) for step in expected)
    assert farthest < 1e-4, f"losses differ by {farthest:.1e}"
    return f"losses within {farthest:.0e}"


def _losses(folder: Path) -> dict[int, float]:
    from moe_ffn.training.monitoring.json_lines import Row, read_lines

    rows = map(dict, read_lines(folder / METRICS_FILE, Row))
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}
