"""Rules that skip an optimizer step or end a run: plain numbers, no trainer."""

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
import torch.distributed as dist
from pydantic import Field
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moe_ffn.config.base import Config
from moe_ffn.kernels.base import on_this_rank
from moe_ffn.training.objective import Objective
from moe_ffn.training.recovery import Checkpointed


class GuardConfig(Config, frozen=True):
    """Optimizer steps to skip: those with a NaN or infinite loss or gradient, and those with a far too high
    loss.
    """

    max_loss_ratio: float | None = Field(default=10.0, gt=1)
    """Skip a step whose loss exceeds this many times the median of the last 32 taken; null: never."""
    max_skipped_in_a_row: int = Field(default=10, ge=1)
    """End the run (exit code 3) after this many consecutive skipped steps."""


STEPS_OF_MEDIAN, STEPS_BEFORE_JUDGING = 32, 5
"""Number of earlier steps whose median a loss is compared with, and the least number of them."""


@dataclass(frozen=True)
class SkippedStep:
    """An optimizer step that was not taken: parameters, moments and biases are what they were."""

    step: int
    """Number of the step, from 1 on, as in rows and alarms."""
    reason: str
    """Problem with its numbers, such as `its loss is nan`."""
    began_in: str | None
    """Module, parameter or loss where the problem began; None if unknown."""
    num_in_a_row: int
    """Number of steps skipped since the last taken one, this one included."""

    def __str__(self) -> str:
        place = f", which began in {self.began_in}" if self.began_in else ""
        return f"{self.reason}{place}"


class Diverged(RuntimeError):  # noqa: N818 - what the run has done
    """The run cannot continue, or no longer learns."""

    def __init__(self, step: int, problem: str) -> None:
        """End a run at optimizer step `step`; `problem` tells what happened, and where it began."""
        super().__init__(f"step {step}: {problem}")
        self.step = step
        self.problem = problem


class StepGuard(Checkpointed):
    """Judges each step by its loss and gradient, and counts those that are skipped.

    Every rank has to be given the same numbers.
    """

    in_checkpoint = ("num_skipped", "num_in_a_row", "began_in", "_losses")

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.num_skipped = 0
        """Skipped steps of the whole run."""
        self.num_in_a_row = 0
        """Skipped steps since the last step that was taken."""
        self.began_in: str | None = None
        """Place of the first NaN or infinity of these skipped steps; None if unknown."""
        self._losses: deque[float] = deque(maxlen=STEPS_OF_MEDIAN)

    def check(self, loss: float, gradient_norm: float) -> str | None:
        """Return why a step with these numbers has to be skipped; None if it may be taken."""
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
        """Count a skipped step; `began_in` is the place of its first NaN, if one was found."""
        self.num_skipped += 1
        self.num_in_a_row += 1
        self.began_in = self.began_in or began_in
        return SkippedStep(step, reason, self.began_in, self.num_in_a_row)

    def require_progress(self, skipped: SkippedStep) -> None:
        """Raise Diverged after too many skipped steps in a row."""
        limit = self.config.max_skipped_in_a_row
        if skipped.num_in_a_row >= limit:
            steps = "1 step was" if limit == 1 else f"{limit} steps in a row were"
            raise Diverged(skipped.step, f"{steps} skipped; the last because {skipped}")


def find_nan_source(
    model: nn.Module,
    batches: Iterable[Callable[[], Objective]],
    gradient_scale: float | None = 1.0,
) -> str | None:
    """Return the name of the first value of a step that is not finite; None if all are.

    No hook and no gradient stays behind. Every rank has to call this, and all stop at the same place.

    Args:
        model: the module whose parts are named, by their paths in it.
        batches: a forward pass for each batch of the step, with the randomness it had.
        gradient_scale: factor of the loss before backward; None if a backward pass cannot be repeated, and
            is not searched.
    """
    name = nonfinite_value(model.state_dict())
    if found := found_on_any_rank(name and f"the parameter {name}"):
        return found
    for forward in batches:
        losses, name = _forward_and_source(model, forward)
        if name is None and not _is_finite(losses.total):
            parts = {"cross_entropy": losses.cross_entropy, **losses.balancing}
            name = f"the objective's {nonfinite_value(parts) or 'total'}"
        if found := found_on_any_rank(name):
            return found
        if gradient_scale is not None:
            name = next(iter(_nonfinite_gradients(model, losses.total * gradient_scale)), None)
            if found := found_on_any_rank(name and f"the gradient of {name}"):
                return found
    return None


def found_on_any_rank(found: str | None) -> str | None:
    """Return the first text that a rank has found. A collective: every rank has to call it."""
    if not dist.is_initialized():
        return found
    of_ranks: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(of_ranks, found)
    return next((found for found in of_ranks if found is not None), None)


def nonfinite_value(state: Mapping[str, Any]) -> str | None:
    """Return the name of the first tensor in `state` with NaN or infinity; None without any."""
    return next((name for name, value in state.items() if not _is_finite(value)), None)


def _forward_and_source(
    model: nn.Module, forward: Callable[[], Objective]
) -> tuple[Objective, str | None]:
    """Return the losses of a forward pass, and the first module that makes NaN or infinity in it.

    If no module does, it is the first that receives some, unless its output is finite: a mask of infinities
    does no harm.
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


def _nonfinite_gradients(model: nn.Module, loss: Tensor) -> list[str]:
    """Return the parameters whose gradient is not finite, in the order of the backward pass."""
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
    """Return true if this rank's part of every tensor in `values` is finite."""
    return all(
        bool(on_this_rank(value).isfinite().all())
        for value in tree_leaves(values)
        if isinstance(value, Tensor)
    )
