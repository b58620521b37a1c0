"""Check of an audit on converted weights: do experts belong to the router's rows, and gates to their halves?

Both are decided by the loss on the batch, so the model must be trained and the text must be real.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_ffn.experts.matrices import GatedExperts
from moe_ffn.interop.audit.findings import ORDER, Finding
from moe_ffn.interop.audit.layers import SparseLayer
from moe_ffn.interop.audit.probe import Probe, mode
from moe_ffn.interop.routings import is_experts
from moe_ffn.outputs import Routing
from moe_ffn.training.objective import IGNORED_TARGET, cross_entropy_of

TRAINED = 0.9
"""Cross-entropy as a multiple of a uniform guess's below which a model counts as trained on this text."""

MIN_ERRORS = 2.0
"""Standard errors of the difference of two losses above which it is a difference."""


def check_order(probe: Probe) -> Iterator[Finding]:
    """Move the experts of each layer, and swap gate and up: the loss should rise."""
    with mode(probe.model, training=False), torch.no_grad():
        logits_BSV = probe.logits(labels=None)
        losses_N = _losses_of(probe, logits_BSV)
        guess = math.log(logits_BSV.shape[-1])
        loss = losses_N.mean().item()
        if not loss < TRAINED * guess:
            yield ORDER.skips(
                f"the loss, {loss:.3f}, is not below {TRAINED:g} of a uniform guess's, so it does not tell "
                "whether weights are in their places"
            )
            return
        for layer in probe.reached:
            yield from _layer(probe, layer, losses_N)


def _layer(probe: Probe, layer: SparseLayer, losses_N: Tensor) -> Iterator[Finding]:
    problems: list[Finding] = []
    measured: list[str] = []
    movable = layer.kind == "moe_ffn" or all(map(is_experts, layer.experts))
    if movable and layer.num_experts > 1:
        rise, error, places = min(_moves(probe, layer, losses_N))
        sentence = f"{rise:+.4f} when its experts move by {places} of {layer.num_experts} places"
        measured.append(sentence)
        if rise <= MIN_ERRORS * error:
            # Of two wrong orders one may be better; nothing is better than the right one.
            is_better = rise < -MIN_ERRORS * error
            problems.append(
                ORDER.at(layer.name).finding(
                    "fail" if is_better else "warn",
                    f"the loss changes by {sentence} (standard error {error:.4f}): they are in another order "
                    f"than the router's rows{'' if is_better else ', or are all alike'}",
                    "compare the conversion with its source: moe-ffn diff",
                )
            )
    gated = [module for module in layer.experts if _is_gated(module)]
    if gated:
        with _swapped_gates(gated):
            rise, error = _rise(losses_N, _losses(probe))
        measured.append(f"{rise:+.4f} when gate and up are swapped")
        if rise < -MIN_ERRORS * error:
            problems.append(
                ORDER.at(layer.name).fails(
                    f"the loss falls by {-rise:.4f} when gate and up are swapped",
                    "the conversion swapped the two halves of gate_up: swap them back",
                )
            )
    yield from problems
    if measured and not problems:
        yield ORDER.at(layer.name).passes(f"the loss changes by {' and '.join(measured)}")


def _moves(
    probe: Probe, layer: SparseLayer, losses_N: Tensor
) -> Iterator[tuple[float, float, int]]:
    """Yield the change of the loss, its standard error and the places by which the experts moved."""
    for places in sorted({1, layer.num_experts // 2, layer.num_experts - 1}):
        with _moved_experts(layer, places):
            yield *_rise(losses_N, _losses(probe)), places


def _losses(probe: Probe) -> Tensor:
    """Run the model, and return the loss of each predicted token."""
    return _losses_of(probe, probe.logits(labels=None))


def _losses_of(probe: Probe, logits_BSV: Tensor) -> Tensor:
    losses = cross_entropy_of(logits_BSV, probe.labels_BS, "none")
    return losses[probe.labels_BS.flatten() != IGNORED_TARGET].double()


def _rise(before_N: Tensor, after_N: Tensor) -> tuple[float, float]:
    """Return the mean difference of the losses of the same tokens, and its standard error."""
    difference_N = after_N - before_N
    return difference_N.mean().item(), (difference_N.std() / len(difference_N) ** 0.5).item()


@contextmanager
def _moved_experts(layer: SparseLayer, places: int) -> Iterator[None]:
    """Send each token to the experts that many places after its own."""
    size = layer.num_experts

    def moved(ids: Tensor) -> Tensor:
        return torch.where(ids < size, (ids + places) % size, ids)  # others have no network

    def before_experts(module: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        hidden, ids_TK, weights_TK = (*args, *kwargs.values())[:3]
        return (hidden, moved(ids_TK), weights_TK), {}

    def after_router(module: Any, args: Any, routing: Routing) -> Routing:
        return replace(routing, expert_ids_N=moved(routing.expert_ids_N))

    if layer.kind == "moe_ffn":
        routers: Any = layer.block.routers()  # pyright: ignore[reportCallIssue]
        hooks = [router.register_forward_hook(after_router) for router in routers.values()]
    else:
        hooks = [
            m.register_forward_pre_hook(before_experts, with_kwargs=True) for m in layer.experts
        ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _is_gated(module: Any) -> bool:
    if isinstance(module, GatedExperts):
        return True
    is_floating = all(parameter.is_floating_point() for parameter in module.parameters())
    return (
        bool(getattr(module, "has_gate", False)) and is_floating and hasattr(module, "gate_up_proj")
    )


@contextmanager
def _swapped_gates(modules: list[nn.Module]) -> Iterator[None]:
    for module in modules:
        _swap(module)
    try:
        yield
    finally:
        for module in modules:
            _swap(module)


def _swap(module: Any) -> None:
    """Swap the rows of gate and up in place; twice restores them."""
    if isinstance(module, GatedExperts):
        tensors = [(module.gate_up, 1)]
        is_interleaved = False
    else:
        tensors = [(module.gate_up_proj, 2 if module.is_transposed else 1)]
        is_interleaved = not module.is_concatenated
    for tensor, dim in tensors:
        size = tensor.shape[dim]
        index = torch.arange(size, device=tensor.device)
        index = index ^ 1 if is_interleaved else index.roll(size // 2)
        tensor.copy_(tensor.index_select(dim, index))
