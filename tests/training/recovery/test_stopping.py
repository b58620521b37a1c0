"""A signal ends a run after the step it is at."""

from __future__ import annotations

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
from moe_ffn.training.recovery.stopping import Interrupted, SignalListener, StopOnRequest
from tests.helpers.fitted import MakeConfig

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
