"""A signal ends a run after the step it is at."""

from __future__ import annotations

import math
import os
import signal
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from moe_ffn.data.prepare import PreparedData
from moe_ffn.runs.assemble import build_module, build_trainer, make_callbacks, make_token_data
from moe_ffn.training.recovery.checkpoint_file import newest_first, step_of
from moe_ffn.training.recovery.guard import Diverged, GuardConfig, SkippedStep, StepGuard
from moe_ffn.training.recovery.stopping import Interrupted, SignalListener, StopOnRequest
from tests.helpers.fitted import RATE, MakeConfig, make_rules

SIGNALS = [signal.SIGINT, signal.SIGTERM, signal.SIGHUP]


@pytest.mark.parametrize("signum", SIGNALS)
def test_a_signal_is_reported_once(
    signum: signal.Signals, capfd: pytest.CaptureFixture[str]
) -> None:
    request = SignalListener()
    before = signal.getsignal(signum)

    with request.listening():
        os.kill(os.getpid(), signum)
        if signum != signal.SIGINT:
            os.kill(os.getpid(), signum)

    assert request.signum == signum
    assert (
        capfd.readouterr().err
        == f"\n{signum.name}: ending after this step (Ctrl-C once more ends at once)\n"
    )
    assert signal.getsignal(signum) == before


def test_ctrl_c_again_ends_at_once() -> None:
    with SignalListener().listening():
        os.kill(os.getpid(), signal.SIGTERM)
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


@pytest.mark.parametrize(
    ("step", "should_stop", "ends"), [(7, False, True), (8, False, False), (7, True, False)]
)
def test_a_run_is_not_interrupted_after_its_last_step(
    step: int, should_stop: bool, ends: bool
) -> None:
    """A run that has made its last step comes to its end, with its results, rather than being interrupted."""
    request, saved = SignalListener(), []
    request.signum = signal.SIGTERM
    keeper: Any = SimpleNamespace(
        is_between_steps=lambda trainer, batch: True, save=lambda trainer: saved.append(step)
    )
    trainer: Any = SimpleNamespace(
        global_step=step,
        max_steps=8,
        should_stop=should_stop,
        world_size=1,
        state=SimpleNamespace(fn="fit"),
    )
    stop = StopOnRequest(request, keeper)

    for look in (
        lambda: stop.on_train_batch_end(trainer, trainer, None, {"index": step - 1}, step - 1),
        lambda: stop.on_validation_end(trainer, trainer),
    ):
        with pytest.raises(Interrupted) if ends else nullcontext():
            look()

    assert saved == [step] * 2 * ends
    with pytest.raises(Interrupted):
        stop.on_train_end(trainer, trainer)  # what is left, a last validation, may take long


class Ask(Callback):
    """Sends the signal at the beginning of a micro-batch, or in a validation."""

    def __init__(self, index: int | None = None, validation_at: int | None = None) -> None:
        self.index = index
        self.validation_at = validation_at

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if batch["index"] == self.index:
            os.kill(os.getpid(), signal.SIGTERM)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.global_step == self.validation_at:
            os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.parametrize(
    ("ask", "step"),
    [
        (Ask(index=0), 1),
        (Ask(index=8), 3),
        (Ask(index=9), 4),  # the first of the three batches of step 4, which ends with a validation
        (Ask(validation_at=4), 4),
    ],
    ids=[
        "in the first step",
        "in the last of its batches",
        "before a validation",
        "in a validation",
    ],
)
def test_the_step_is_finished_and_saved(
    make_config: MakeConfig, prepared: PreparedData, tmp_path: Path, ask: Ask, step: int
) -> None:
    config = make_config(
        trainer={
            "max_steps": 8,
            "validate_every_n_steps": 4,
            "accumulate_grad_batches": 3,
            "accelerator": "cpu",
        }
    )
    callbacks = make_callbacks(config, prepared, tmp_path)
    trainer = build_trainer(config, tmp_path, "32-true", [], callbacks)
    trainer.callbacks.insert(0, ask)  # pyright: ignore[reportAttributeAccessIssue]

    with (
        callbacks.stop.request.listening(),
        pytest.raises(Interrupted, match=f"SIGTERM after step {step}") as interrupted,
    ):
        trainer.fit(build_module(config, prepared), datamodule=make_token_data(config, prepared))

    assert interrupted.value.step == step
    assert step_of(newest_first(tmp_path / "checkpoints")[0]) == step
    assert callbacks.validation.last_step == (4 if step == 4 else -1)


# -- which steps are taken, only by their numbers, and the messages about skipped ones


def guard_after(*losses: float, **config: object) -> StepGuard:
    guard = StepGuard(GuardConfig.model_validate(config))
    for loss in losses:
        guard.accept(loss)
    return guard


@pytest.mark.parametrize(
    ("before", "loss", "options", "reason"),
    [
        ([], 1e9, {}, None),
        ([2.0] * 4, 1e9, {}, None),  # too few steps to compare with
        ([9.0, 2.0, 2.0, 2.0, 1.0], 19.9, {}, None),
        (
            [9.0, 2.0, 2.0, 2.0, 1.0],
            205.0,
            {},
            "its loss 205 is 102 times the median of the steps before, 2 (limit 10)",
        ),
        ([*[1.0] * 32, *[6.0] * 17], 50.0, {}, None),  # the median forgets
        ([-1.0] * 9, 50.0, {}, None),
        (
            [2.0] * 5,
            7.0,
            {"max_loss_ratio": 3.0},
            "its loss 7 is 3.5 times the median of the steps before, 2 (limit 3)",
        ),
        ([2.0] * 5, 1e30, {"max_loss_ratio": None}, None),
        ([2.0] * 5, math.inf, {"max_loss_ratio": None}, "its loss is inf"),
        ([], -math.inf, {}, "its loss is -inf"),
    ],
)
def test_a_step_is_judged_by_its_loss(
    before: list[float], loss: float, options: dict[str, object], reason: str | None
) -> None:
    assert guard_after(*before, **options).check(loss, 1.0) == reason


def test_a_step_is_judged_by_its_gradient() -> None:
    assert guard_after().check(1.0, 1e9) is None
    assert guard_after().check(1.0, math.nan) == "its gradient norm is nan"
    assert str(guard_after().check(math.nan, 1.0)) == "its loss is nan"


def test_a_row_of_skipped_steps_remembers_where_it_began() -> None:
    guard = guard_after(1.0)
    first = guard.skip(2, "its loss is nan", "decoder.embedding")
    second = guard.skip(3, "its loss is 90", None)
    assert str(first) == "its loss is nan, which began in decoder.embedding"
    assert str(second) == "its loss is 90, which began in decoder.embedding"
    assert (second.num_in_a_row, guard.num_in_a_row, guard.num_skipped) == (2, 2, 2)

    guard.accept(1.0)
    third = guard.skip(5, "its loss is inf", None)

    assert str(third) == "its loss is inf"
    assert (third.num_in_a_row, guard.num_skipped) == (1, 3)


def test_too_many_in_a_row_end_the_run() -> None:
    guard = guard_after(max_skipped_in_a_row=2)
    guard.require_progress(guard.skip(4, "its loss is nan", "decoder.embedding"))
    with pytest.raises(
        Diverged,
        match=r"^step 5: 2 steps in a row were skipped; the last because its loss is inf, which began in "
        r"decoder\.embedding$",
    ):
        guard.require_progress(guard.skip(5, "its loss is inf", None))
    guard = guard_after(max_skipped_in_a_row=1)
    with pytest.raises(Diverged, match=r"^step 1: 1 step was skipped; the last because its loss"):
        guard.require_progress(guard.skip(1, "its loss is nan", None))


def test_a_guard_resumes_from_a_saved_state() -> None:
    guard = guard_after(*map(float, range(40)))
    guard.skip(41, "its loss is nan", "decoder.embedding")
    other = guard_after(1.0)

    other.load_state_dict(guard.state_dict())

    assert other.state_dict() == guard.state_dict()
    assert other.state_dict()["losses"] == list(range(8, 40))
    other.accept(40.0)
    assert other.state_dict()["losses"] == list(range(9, 41)), "the median still forgets"
    other.load_state_dict(guard.state_dict())
    assert other.skip(42, "its loss is nan", None) == SkippedStep(
        42, "its loss is nan", "decoder.embedding", 2
    )


# -- messages


def test_the_first_of_consecutive_skips_is_an_alarm_with_advice() -> None:
    rules = make_rules()
    (alarm,) = rules.skipped(SkippedStep(17, "its loss is nan", "decoder.embedding", 1), limit=3)
    assert (alarm.kind, alarm.layer) == ("skipped_step", None)
    assert str(alarm) == (
        "step 17: skipped (1 in a row, 3 end the run): its loss is nan, which began in "
        f"decoder.embedding; if it recurs, {RATE}"
    )


def test_skips_soon_after_raise_no_alarm() -> None:
    rules = make_rules()  # 20 steps
    told = [
        step
        for step in (17, 18, 30, 50, 71)
        if rules.skipped(SkippedStep(step, "its loss is nan", None, 1), limit=3)
    ]
    assert told == [17, 71]
