"""The moment at which a run in this process is cut, asked to end or as if its process had died."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from moe_ffn.training.module import LanguageModel


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


@contextlib.contextmanager
def cutting(cut: Cut | None) -> Iterator[None]:
    """Within, the cut happens in the middle of its step, or of the validation after it."""
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
