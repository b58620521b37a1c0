"""Which optimizer steps are taken, and when a run has to end: plain numbers, no trainer."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moe_ffn.config.base import Config
from moe_ffn.kernels.base import on_this_rank
from moe_ffn.training.objective import Objective


class GuardConfig(Config, frozen=True):
    """Which optimizer steps are skipped: always where the loss or gradient is NaN or infinite, and where the
    loss is far too high.
    """

    max_loss_ratio: float | None = Field(default=10.0, gt=1)
    """Skip a step whose loss exceeds this many times the median of the last 32 taken; null: never."""
    max_skipped_in_a_row: int = Field(default=10, ge=1)
    """End the run (exit code 3) after this many consecutive skipped steps."""


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
    """The run cannot go on, or no longer learns."""

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
        """Skipped steps of the whole run."""
        self.num_in_a_row = 0
        """Skipped steps since the last step that was taken."""
        self.began_in: str | None = None
        """Where the first NaN or infinity of these skipped steps was found; None if not known."""
        self._losses: deque[float] = deque(maxlen=STEPS_OF_MEDIAN)

    def check(self, loss: float, gradient_norm: float) -> str | None:
        """Why a step with these numbers has to be skipped; None where it may be taken."""
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

    def accept(self, loss: float) -> None:
        """Count a step that is taken."""
        self._losses.append(loss)
        self.num_in_a_row = 0
        self.began_in = None

    def skip(self, step: int, reason: str, began_in: str | None) -> SkippedStep:
        """Count a step that is not taken; `began_in` where that was looked for and found."""
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


def find_nan_source(
    model: nn.Module,
    batches: Iterable[Callable[[], Objective]],
    gradient_scale: float | None = 1.0,
    agree: Callable[[str | None], str | None] = lambda found: found,
) -> str | None:
    """The first thing of a step that is not finite, by a name a person can look up; None if all is.

    Leaves no hook and no gradient behind. Every rank has to call it.

    Args:
        model: the module whose parts are named, by their paths in it.
        batches: for each batch of the step a forward pass of it, with the randomness it had.
        gradient_scale: what the loss was multiplied by before backward; None where a backward pass cannot be
            repeated, so that nothing is found in it.
        agree: what was found on any rank, from what was found on this one: a forward pass may need all of
            them, so that all have to stop looking at once.
    """
    name = nonfinite_value(model.state_dict())
    if found := agree(name and f"the parameter {name}"):
        return found
    for forward in batches:
        losses, name = _forward_and_source(model, forward)
        if name is None and not _is_finite(losses.total):
            parts = {"cross_entropy": losses.cross_entropy, **losses.balancing}
            name = f"the objective's {nonfinite_value(parts) or 'total'}"
        if found := agree(name):
            return found
        if gradient_scale is not None:
            name = next(iter(_of_gradients(model, losses.total * gradient_scale)), None)
            if found := agree(name and f"the gradient of {name}"):
                return found
    return None


def nonfinite_value(state: Mapping[str, Any]) -> str | None:
    """The name of the first tensor in `state` with NaN or infinity; None without any."""
    return next((name for name, value in state.items() if not _is_finite(value)), None)


def _forward_and_source(
    model: nn.Module, forward: Callable[[], Objective]
) -> tuple[Objective, str | None]:
    """The losses of a forward pass, and the first module that makes NaN or infinity in it.

    Where none does, the first that is handed some, unless its output is finite: a mask of infinities does no
    harm.
    """
    makers, handed = list[str](), dict[str, str]()

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not _is_finite((args, kwargs)):
            handed[name] = f"the input of {name}"

    def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if _is_finite(output):
            handed.pop(name, None)
        elif _is_finite((args, kwargs)):
            makers.append(name)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            for register, hook in (
                (module.register_forward_pre_hook, before),
                (module.register_forward_hook, after),
            ):
                hooks.enter_context(register(partial(hook, name), with_kwargs=True))
        losses = forward()
    return losses, next(iter((*makers, *handed.values())), None)


def _of_gradients(model: nn.Module, loss: Tensor) -> list[str]:
    """The parameters whose gradient is not finite, in the order in which backward reaches them."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: list[str] = []

    def look(name: str, gradient: Tensor) -> None:
        if not _is_finite(gradient):
            found.append(name)

    with ExitStack() as hooks:
        for name, parameter in parameters.items():
            hooks.enter_context(parameter.register_hook(partial(look, name)))
        # Unlike `backward` this adds to no `.grad`, and starts nothing that waits for one, such as DDP.
        torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return found


def _is_finite(values: Any) -> bool:
    """Whether what is on this rank of every tensor in `values` is; integers always are."""
    return all(
        bool(on_this_rank(value).isfinite().all())
        for value in tree_leaves(values)
        if isinstance(value, Tensor)
    )
