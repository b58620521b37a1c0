"""Which optimizer steps are taken, and when a run has to end: plain numbers, no trainer."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any

from moe_ffn.training.config import GuardConfig

STEPS_OF_MEDIAN, STEPS_BEFORE_JUDGING = 32, 5
"""A loss is too high beside the median of the steps taken before it, once there are a few."""


@dataclass(frozen=True)
class SkippedStep:
    """An optimizer step that was not taken: parameters, moments and biases are what they were."""

    step: int
    """Counted from 1, as in rows and alarms."""
    reason: str
    """What is wrong with its numbers: `its loss is nan`."""
    began_in: str | None
    """The module, parameter or loss where that began; None where it is not known."""
    num_in_a_row: int
    """How many steps were skipped since the last one that was taken, with this one."""

    def __str__(self) -> str:
        place = f", which began in {self.began_in}" if self.began_in else ""
        return f"{self.reason}{place}"


class Diverged(RuntimeError):  # noqa: N818 - what the run has done
    """A run that cannot go on, or no longer learns."""

    def __init__(self, step: int, problem: str) -> None:
        """A run that ends at optimizer step `step` with a problem: what happened, and where it began."""
        super().__init__(f"step {step}: {problem}")
        self.step = step
        self.problem = problem


class StepGuard:
    """Judges each step by its loss and gradient, and counts those that are skipped.

    Every rank has to be given the same numbers.
    """

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.num_skipped = 0
        """In the whole run."""
        self.num_in_a_row = 0
        """Since the last step that was taken."""
        self.began_in: str | None = None
        """Where the trouble of this row of skipped steps began, as far as is known."""
        self._losses: deque[float] = deque(maxlen=STEPS_OF_MEDIAN)

    def objection(self, loss: float, gradient_norm: float) -> str | None:
        """Why a step with these numbers is not to be taken; None where it is."""
        if not math.isfinite(loss):
            return f"its loss is {loss}"
        if not math.isfinite(gradient_norm):
            return f"its gradient norm is {gradient_norm}"
        limit = self.config.max_loss_ratio
        if limit is not None and len(self._losses) >= STEPS_BEFORE_JUDGING:
            usual = median(self._losses)
            if loss > limit * usual > 0:
                return (
                    f"its loss {loss:.4g} is {loss / usual:.3g} times the median of the steps before, "
                    f"{usual:.4g} (limit {limit:g})"
                )
        return None

    def take(self, loss: float) -> None:
        """The step is taken."""
        self._losses.append(loss)
        self.num_in_a_row = 0
        self.began_in = None

    def skip(self, step: int, reason: str, began_in: str | None) -> SkippedStep:
        """The step is not taken; `began_in` where that was looked for and found."""
        self.num_skipped += 1
        self.num_in_a_row += 1
        self.began_in = self.began_in or began_in
        return SkippedStep(step, reason, self.began_in, self.num_in_a_row)

    def require_progress(self, skipped: SkippedStep) -> None:
        """Raise Diverged where too many steps were skipped in a row."""
        limit = self.config.max_skipped_in_a_row
        if skipped.num_in_a_row >= limit:
            steps = "1 step was" if limit == 1 else f"{limit} steps in a row were"
            raise Diverged(skipped.step, f"{steps} skipped; the last because {skipped}")

    def state_dict(self) -> dict[str, Any]:
        """Plain values, which a checkpoint loads without running code."""
        return {
            "num_skipped": self.num_skipped,
            "num_in_a_row": self.num_in_a_row,
            "began_in": self.began_in,
            "losses": list(self._losses),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.num_skipped = state["num_skipped"]
        self.num_in_a_row = state["num_in_a_row"]
        self.began_in = state["began_in"]
        self._losses = deque(state["losses"], maxlen=STEPS_OF_MEDIAN)
