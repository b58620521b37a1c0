"""Where NaN or infinity began: found by repeating a step, so that a healthy one costs nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from moe_ffn.training.objective import Objective


def where_it_began(
    model: nn.Module, batches: Iterable[Callable[[], Objective]], gradient_scale: float = 1.0
) -> str | None:
    """The first thing of a step that is not finite, by a name a person can look up; None if all is.

    Leaves no hook and no gradient behind.

    Args:
        model: the module whose parts are named, by their paths in it.
        batches: for each batch of the step a forward pass of it, with the randomness it had.
        gradient_scale: what the loss was multiplied by before backward.
    """
    if name := nonfinite_value(model.state_dict()):
        return f"the parameter {name}"
    for forward in batches:
        with _watched(model) as found:
            losses = forward()
        for name in (*found.begun, *found.reached, *_of_losses(losses)):
            return name
        for name in _of_gradients(model, losses.total * gradient_scale):
            return f"the gradient of {name}"
    return None


def nonfinite_value(state: Mapping[str, Any]) -> str | None:
    """The name of the first tensor in `state` with NaN or infinity; None without any."""
    return next((name for name, value in state.items() if not _is_finite(value)), None)


class _Found:
    def __init__(self) -> None:
        self.begun: list[str] = []
        """Modules whose output was not finite although their input was, in the order of the pass."""
        self.reached: list[str] = []
        """What was not finite without any such module: something between two of them."""


@contextmanager
def _watched(model: nn.Module) -> Iterator[_Found]:
    """What the modules inside `model` are given and return until the block ends."""
    found = _Found()

    def before(name: str, inputs: Any) -> None:
        if not found.begun and not _is_finite(inputs):
            found.reached.append(f"the input of {name}")

    def after(name: str, inputs: Any, output: Any) -> None:
        if _is_finite(inputs) and not _is_finite(output):
            found.begun.append(name)

    handles: list[Any] = []
    for name, module in model.named_modules():
        handles += [
            module.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: before(name, (args, kwargs)), with_kwargs=True
            ),
            module.register_forward_hook(
                lambda _, args, kwargs, output, name=name: after(name, (args, kwargs), output),
                with_kwargs=True,
            ),
        ]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _of_losses(losses: Objective) -> Iterator[str]:
    if not _is_finite(losses.total):
        parts = {"cross_entropy": losses.cross_entropy, **losses.balancing}
        yield f"the objective's {nonfinite_value(parts) or 'total'}"


def _of_gradients(model: nn.Module, loss: Tensor) -> list[str]:
    """The parameters whose gradient is not finite, in the order in which backward reaches them."""
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found: list[str] = []

    def look(name: str, gradient: Tensor) -> None:
        if not _is_finite(gradient):
            found.append(name)

    handles = [
        parameter.register_hook(lambda gradient, name=name: look(name, gradient))
        for name, parameter in names.items()
    ]
    try:
        # Unlike `backward` this adds to no `.grad`, and wakes nobody who waits for one, such as DDP.
        torch.autograd.grad(loss, list(names.values()), allow_unused=True)
    finally:
        for handle in handles:
            handle.remove()
    return found


def _is_finite(values: Any) -> bool:
    """Whether every tensor somewhere in `values` is; integers always are."""
    return all(
        bool(value.isfinite().all()) for value in tree_leaves(values) if isinstance(value, Tensor)
    )
