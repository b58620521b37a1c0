"""Early ends of a run: on a signal, when its time is up, or when the loss stops falling.

The run first finishes the current step and saves it. If a rank is lost, the run ends immediately.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from types import FrameType
from typing import Any

import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, Timer
from lightning.pytorch.strategies.launchers.subprocess_script import _SubprocessScriptLauncher

from moe_ffn.config.errors import first_line
from moe_ffn.training.recovery import TrainingError
from moe_ffn.training.recovery.checkpoint_keeper import CheckpointKeeper

_STOP_SIGNALS = [
    getattr(signal, name) for name in ("SIGINT", "SIGTERM", "SIGHUP") if hasattr(signal, name)
]


class Interrupted(TrainingError):  # noqa: N818 - nothing went wrong
    """A signal ended the run early."""

    def __init__(self, signum: int, step: int) -> None:
        self.signum = signum
        self.step = step
        super().__init__(f"{signal.Signals(signum).name} after step {step}")


def _handle(handler: Any) -> dict[int, Any]:
    """Set the handler of all stop signals; return signal -> handler before; empty outside the main thread."""
    is_main = threading.current_thread() is threading.main_thread()
    return {signum: signal.signal(signum, handler) for signum in _STOP_SIGNALS if is_main}


@contextmanager
def _handling(handler: Any) -> Iterator[None]:
    before = _handle(handler)
    try:
        yield
    finally:
        for signum, handler_before in before.items():
            signal.signal(signum, handler_before)


@contextmanager
def ending_at_once(awaited: str) -> Iterator[None]:
    """Let signals end this process at once while torch's C++ code waits; after 10 s, print for whom."""
    line = f"waiting for {awaited}\n"
    timer = threading.Timer(10, lambda: os.write(sys.stderr.fileno(), line.encode()))
    timer.daemon = True
    timer.start()
    try:
        with _handling(signal.SIG_DFL):
            yield
    finally:
        timer.cancel()


class SignalListener:
    """Stores a signal that asks this process to end; a second Ctrl-C ends it immediately."""

    def __init__(self) -> None:
        self.signum = 0

    def listening(self) -> AbstractContextManager[None]:
        """Store SIGINT, SIGTERM and SIGHUP within the block, instead of ending the process."""
        return _handling(self._store)

    def listen(self) -> None:
        _handle(self._store)

    def _store(self, signum: int, frame: FrameType | None) -> None:
        if self.signum and signum == signal.SIGINT:
            raise KeyboardInterrupt
        if not self.signum:
            name = signal.Signals(signum).name
            line = f"\n{name}: ending after this step (Ctrl-C once more ends at once)\n"
            # Standard error may be closed, or have no descriptor.
            with suppress(OSError, ValueError):
                # Not `print`, since the signal may have interrupted a `print`.
                os.write(sys.stderr.fileno(), line.encode())
        self.signum = signum


class StopOnRequest(Callback):
    """Saves and raises `Interrupted` on every rank, once any rank has received a signal.

    This happens between steps, and if a step has a validation, after it, so that a resumed run equals an
    uninterrupted run.
    """

    def __init__(self, request: SignalListener, keeper: CheckpointKeeper) -> None:
        self.request = request
        self.keeper = keeper

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Replace Lightning's handlers, which would end one rank while the other ranks wait for it.
        self.request.listen()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self.keeper.is_between_steps(trainer, batch):
            self._stop_before_next_step(trainer)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.request.listen()  # `trainer.validate` installs Lightning's handlers again

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit":
            self._stop_before_next_step(trainer)
        else:
            self._stop_if_requested(trainer)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_if_requested(trainer)  # now, since a long validation may follow

    def _stop_before_next_step(self, trainer: Trainer) -> None:
        if trainer.global_step < trainer.max_steps and not trainer.should_stop:
            self._stop_if_requested(trainer)

    def _stop_if_requested(self, trainer: Trainer) -> None:
        signum = self.request.signum
        if trainer.world_size > 1:
            local = torch.tensor(signum, device=trainer.strategy.root_device)
            signum = int(trainer.strategy.reduce(local, reduce_op="max"))
        if signum:
            self.keeper.save(trainer)
            raise Interrupted(signum, trainer.global_step)


class StepTimer(Timer):
    """Ends a run after the current step, once its time is up.

    Lightning's timer ends a run after any batch, which would lose the gradients accumulated for a step.
    """

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if (batch["index"] + 1) % trainer.accumulate_grad_batches == 0:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)


class ResumableEarlyStopping(EarlyStopping):
    """Early stopping whose patience a resumed run can change."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({**state_dict, "patience": self.patience})


_LOST_RANK = re.compile(
    r"(closed|reset) by peer|socket closed|broken pipe|remote process|timed? ?out", re.I
)
"""Words in errors of gloo and NCCL after another process has ended."""

LOST_RANK_SECONDS = 2.0
"""Seconds to wait for the exit of a process after the connection to it is lost."""


def lost_rank(error: RuntimeError, trainer: Trainer) -> str | None:
    """Return a sentence about the lost rank that made a collective fail; None if `error` has another cause.

    If a rank was lost, this kills the ranks that this process started.
    """
    if trainer.world_size == 1 or not _LOST_RANK.search(str(error)):
        return None
    launcher = trainer.strategy.launcher
    if not (isinstance(launcher, _SubprocessScriptLauncher) and launcher.procs):
        return f"a rank has ended, or cannot be reached ({first_line(error)}); see the output of its launcher"
    deadline = time.monotonic() + LOST_RANK_SECONDS
    while time.monotonic() < deadline and all(p.poll() is None for p in launcher.procs):
        time.sleep(0.05)
    ended = {rank: process.returncode for rank, process in enumerate(launcher.procs, start=1)}
    for process in launcher.procs:
        process.kill()
        process.wait()
    # Lightning watches this list, and would kill this process before its files are closed.
    launcher.procs.clear()
    rank, code = next(((r, code) for r, code in ended.items() if code is not None), (None, 0))
    if rank is None:
        return f"a rank cannot be reached ({first_line(error)})"
    return f"rank {rank} " + (
        f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
    )
