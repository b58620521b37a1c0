"""Interrupt a run: ask it to end, let it die, or send a signal at the worst moment.

python tests/helpers/cut.py MOMENT SIGNAL NTH [OPTION...]
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pkgutil import resolve_name
from typing import Any
from unittest.mock import patch

from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.train import main
from moe_ffn.training.module import LanguageModel


class Crash(Exception):  # noqa: N818 - made by the test, not by the program
    """The process dies here, as far as the run can tell."""


@dataclass(frozen=True)
class Cut:
    """The moment at which a run ends early."""

    name: str
    step: int
    """The optimizer step it happens in, counted from 1."""
    is_crash: bool = False
    """True for a death without a save; otherwise SIGTERM asks the run to end."""
    within: str = "training_step"
    """The method of LanguageModel in which it happens."""

    def happen(self) -> None:
        if self.is_crash:
            raise Crash
        signal.raise_signal(signal.SIGTERM)


@contextlib.contextmanager
def cutting(cut: Cut | None) -> Iterator[None]:
    """Cut the run in the middle of the step of `cut`, or of the validation after it."""
    if cut is None:
        yield
        return
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


MOMENTS = {
    # Called once for each group of parameters: after the first, half of them are updated.
    "update": "torch.optim.adam.adam",
    # Called with a file that is written but has no checksum and no name yet.
    "save": "moe_ffn.training.recovery.checkpoint_file._append_checksum",
}


@contextlib.contextmanager
def killing(moment: str, signum: signal.Signals, nth: int) -> Iterator[None]:
    """Send this process a signal in the n-th of such moments."""
    original: Callable[..., object] = resolve_name(MOMENTS[moment])
    calls = 0

    def wrapped(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        result = original(*args, **kwargs)
        if calls == nth:
            os.kill(os.getpid(), signum)
        return result

    with patch(MOMENTS[moment], wrapped):
        yield


if __name__ == "__main__":
    moment, name, nth = sys.argv[1:4]
    del sys.argv[1:4]
    with killing(moment, signal.Signals[name], int(nth)):
        raise SystemExit(exit_on_bad_input(main))
