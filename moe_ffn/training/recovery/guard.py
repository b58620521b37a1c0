"""Rules that skip an optimizer step or end a run, and the search for the source of a NaN."""

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
from moe_ffn.training.recovery import Checkpointed, TrainingError


class GuardConfig(Config, frozen=True):
    """Rules for skipping optimizer steps. A NaN or infinite loss or gradient always skips the step."""

    max_loss_ratio: float | None = Field(default=10.0, gt=1)
    """Skip a step whose loss exceeds this multiple of the median of the last 32 steps taken; null: never."""
    max_skipped_in_a_row: int = Field(default=10, ge=1)
    """End the run (exit code 3) after this many consecutive skipped steps."""


STEPS_OF_MEDIAN, STEPS_BEFORE_JUDGING = 32, 5
"""Number of earlier steps whose median loss a loss is compared with, and the minimum number of them."""


TEACHER_LOGITS = "the logits of the teacher"
"""Place of a NaN in a distillation loss."""


@dataclass(frozen=True)
class SkippedStep:
    """A skipped optimizer step, which changed no parameters, moments or biases."""

    step: int
    """Number of the step, from 1."""
    reason: str
    """Reason for skipping the step, such as `its loss is nan`."""
    began_in: str | None
    """Module, parameter or loss where the problem began; None if unknown."""
    num_in_a_row: int
    """Number of consecutive skipped steps, including this one."""

    @property
    def advice(self) -> str:
        """Option to change if the step's loss says nothing about the run; empty otherwise."""
        is_of_teacher = self.began_in == TEACHER_LOGITS
        return "use another objective.distill.teacher, with finite logits" if is_of_teacher else ""

    def __str__(self) -> str:
        place = f", which began in {self.began_in}" if self.began_in else ""
        return f"{self.reason}{place}"


class Diverged(TrainingError):  # noqa: N818 - what the run has done
    """The run cannot continue, or no longer learns."""

    def __init__(self, skipped: SkippedStep, problem: str) -> None:
        super().__init__(f"step {skipped.step}: {problem}")
        self.step = skipped.step
        self.skipped = skipped


class StepGuard(Checkpointed):
    """Decides from the loss and the gradient norm whether to skip a step, and counts skipped steps.

    Callers have to pass the same loss and gradient norm on every rank.
    """

    in_checkpoint = ("num_skipped", "num_in_a_row", "began_in", "_losses")

    def __init__(self, config: GuardConfig) -> None:
        self.config = config
        self.num_skipped = 0
        """Number of steps skipped in the whole run."""
        self.num_in_a_row = 0
        """Number of consecutive skipped steps up to now."""
        self.began_in: str | None = None
        """Place of the first NaN or infinity in these consecutive steps; None if unknown."""
        self._losses: deque[float] = deque(maxlen=STEPS_OF_MEDIAN)

    def check(self, loss: float, gradient_norm: float) -> str | None:
        """Return the reason to skip a step with this loss and gradient norm; None to take the step."""
        if not math.isfinite(loss):
            return f"its loss is {loss}"
        if not math.isfinite(gradient_norm):
            return f"its gradient norm is {gradient_norm}"
        limit = self.config.max_loss_ratio
        if limit is not None and len(self._losses) >= STEPS_BEFORE_JUDGING:
            baseline = median(self._losses)
            if loss > limit * baseline > 0:
                return (
                    f"its loss {loss:.4g} is {loss / baseline:.3g} times the median of the steps before, "
                    f"{baseline:.4g} (limit {limit:g})"
                )
        return None

    def accept(self, loss: float) -> None:
        """Record a step that is taken."""
        self._losses.append(loss)
        self.num_in_a_row = 0
        self.began_in = None

    def skip(self, step: int, reason: str, began_in: str | None) -> SkippedStep:
        """Record a skipped step; `began_in` is the place of its first NaN, if one was found."""
        self.num_skipped += 1
        self.num_in_a_row += 1
        self.began_in = self.began_in or began_in
        return SkippedStep(step, reason, self.began_in, self.num_in_a_row)

    def require_progress(self, skipped: SkippedStep) -> None:
        """Raise Diverged after too many skipped steps in a row."""
        limit = self.config.max_skipped_in_a_row
        if skipped.num_in_a_row >= limit:
            steps = "1 step was" if limit == 1 else f"{limit} steps in a row were"
            raise Diverged(skipped, f"{steps} skipped; the last because {skipped}")


def find_nan_source(
    model: nn.Module, batches: Iterable[Callable[[], Objective]], gradient_scale: float | None = 1.0
) -> str | None:
    """Return the name of the first NaN or infinite value in a step; None if all values are finite.

    `batches` repeat the forward pass of each batch, with equal randomness. The loss times `gradient_scale` is
    differentiated; None searches only the forward pass. This leaves no hooks behind, and `.grad` unchanged. A
    collective: every rank has to call this, and all ranks return the same name.
    """
    name = nonfinite_name(model.state_dict())
    if source := first_over_ranks(name and f"the parameter {name}"):
        return source
    for forward in batches:
        losses, name = _forward_and_source(model, forward)
        if name is None and not _is_finite(losses.total):
            terms = {"cross_entropy": losses.cross_entropy, **losses.other_terms}
            # The model's own logits are finite, so the divergence from finite logits would be.
            term = nonfinite_name(terms) or "total"
            name = TEACHER_LOGITS if term == "distillation" else f"the objective's {term}"
        if source := first_over_ranks(name):
            return source
        if gradient_scale is not None:
            name = next(iter(_nonfinite_gradients(model, losses.total * gradient_scale)), None)
            if source := first_over_ranks(name and f"the gradient of {name}"):
                return source
    return None


def first_over_ranks(name: str | None) -> str | None:
    """Return the name from the first rank that has one. A collective: every rank has to call this."""
    if not dist.is_initialized():
        return name
    names: list[str | None] = [None] * dist.get_world_size()
    dist.all_gather_object(names, name)
    return next((name for name in names if name is not None), None)


def nonfinite_name(values: Mapping[str, Any]) -> str | None:
    """Return the name of the first tensor in `values` with NaN or infinity; None if all are finite."""
    return next((name for name, value in values.items() if not _is_finite(value)), None)


def _forward_and_source(
    model: nn.Module, forward: Callable[[], Objective]
) -> tuple[Objective, str | None]:
    """Return the losses of a forward pass, and the first module with finite inputs and a nonfinite output.

    If there is none, the source is the first module whose input and output are both nonfinite. A module with
    a finite output is not a source, since a mask may hold infinities.
    """
    sources, nonfinite_inputs = list[str](), dict[str, str]()

    def before(name: str, module: nn.Module, args: Any, kwargs: Any) -> None:
        if not _is_finite((args, kwargs)):
            nonfinite_inputs[name] = f"the input of {name}"

    def after(name: str, module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        if _is_finite(output):
            nonfinite_inputs.pop(name, None)
        elif _is_finite((args, kwargs)) and not any(
            inner.startswith(f"{name}.") for inner in (*sources, *nonfinite_inputs)
        ):
            sources.append(name)

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            pre_hook, hook = partial(before, name), partial(after, name)
            hooks.enter_context(module.register_forward_pre_hook(pre_hook, with_kwargs=True))
            hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
        losses = forward()
    return losses, next(iter((*sources, *nonfinite_inputs.values())), None)


def _nonfinite_gradients(model: nn.Module, loss: Tensor) -> list[str]:
    """Return the parameters whose gradient is not finite, in the order of the backward pass."""
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    nonfinite: list[str] = []

    def check(name: str, gradient: Tensor) -> None:
        if not _is_finite(gradient):
            nonfinite.append(name)

    with ExitStack() as hooks:
        for name, parameter in parameters.items():
            hooks.enter_context(parameter.register_hook(partial(check, name)))
        # Unlike `backward`, this changes no `.grad`, and does not start DDP's reduction of gradients.
        torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return nonfinite


def _is_finite(values: Any) -> bool:
    """Return True if this rank's part of every tensor in `values` is finite."""
    return all(
        bool(on_this_rank(value).isfinite().all())
        for value in tree_leaves(values)
        if isinstance(value, Tensor)
    )
