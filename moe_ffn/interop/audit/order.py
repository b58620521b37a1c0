"""Check of an audit on converted weights: do experts belong to the router's rows, and gates to their halves?

Both are decided by the loss on the batch, so the model must be trained and the text must be real.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_ffn.experts.matrices import GatedExperts
from moe_ffn.interop.audit.findings import ORDER, Finding
from moe_ffn.interop.audit.layers import SparseLayer
from moe_ffn.interop.audit.probe import Probe, mode
from moe_ffn.interop.routings import inputs_of_experts, is_experts
from moe_ffn.outputs import Routing
from moe_ffn.training.objective import IGNORED_TARGET, cross_entropy_of

TRAINED = 0.9
"""Cross-entropy as a multiple of a uniform guess's below which a model counts as trained on this text."""

SEEN, CERTAIN = 2.0, 5.0
"""Standard errors above which a difference of two losses causes a warning, or a failure. A layer is measured
several times and models have many layers, so that 4 would accuse some healthy ones."""

LARGE = 0.01
"""Share of the loss; smaller changes accuse no layer: after little training, experts do similar work."""

NUM_SAMPLES = 32
"""Number of blocks of tokens, or slightly more, whose differences give the standard error."""

OTHER_ORDER = "in another order than the router's rows"
COMPARE = "compare the conversion with its source: moe-ffn diff"

ALIKE = 1e-3
"""Share of the loss; if permuting the experts changes the loss by less, the experts are alike."""


def check_order(probe: Probe) -> Iterator[Finding]:
    """Move the experts of each layer, and swap gate and up: the loss should rise."""
    if too_early := probe.too_early("places of weights"):
        yield ORDER.skips(too_early)
        return
    with mode(probe.model, training=False), torch.no_grad():
        logits_BSV = probe.logits(labels=None)
        losses_BS = _losses(probe, logits_BSV)
        if losses_BS.isfinite().any(dim=1).sum() < 2:
            yield ORDER.skips("one sequence does not show how losses scatter; give two or more")
            return
        guess = math.log(logits_BSV.shape[-1])
        loss = losses_BS.nanmean().item()
        if not loss < TRAINED * guess:
            yield ORDER.skips(
                f"the loss, {loss:.3f}, is not below {TRAINED:g} of a uniform guess's, so it does not tell "
                "whether weights are in their places"
            )
            return
        for layer in probe.reached:
            yield from _layer(probe, layer, losses_BS)


def _layer(probe: Probe, layer: SparseLayer, losses_BS: Tensor) -> Iterator[Finding]:
    check = ORDER.at(layer.name)
    problems: list[Finding] = []
    measured: list[str] = []
    loss = losses_BS.nanmean().item()
    movable = layer.kind == "moe_ffn" or all(map(is_experts, layer.experts))
    if movable and layer.num_experts > 1:
        rises: list[tuple[float, float, int]] = []
        for places in sorted({1, layer.num_experts // 2, layer.num_experts - 1}):
            with _moved_experts(layer, places):
                rises.append((*_rise(probe, losses_BS), places))
        rise, error, places = min(rises)
        sentence = f"{rise:+.4f} when its experts move by {places} of {layer.num_experts} places"
        measured.append(sentence)
        seen = f"the loss changes by {sentence} (standard error {error:.4f})"
        largest = max(abs(rise) for rise, *_ in rises)
        if largest <= ALIKE * loss:
            problems.append(check.warns(f"{seen}: they are all alike", COMPARE))
        elif rise > SEEN * error:
            pass  # the order is right
        elif largest <= LARGE * loss:
            problems.append(
                check.skips(f"{seen}: they do similar work, so their order does not show")
            )
        elif rise < -max(CERTAIN * error, LARGE * loss) and _stands_out([r for r, *_ in rises]):
            problems.append(check.fails(f"{seen}: they are {OTHER_ORDER}", COMPARE))
        else:
            problems.append(
                check.warns(
                    f"{seen}: they are {OTHER_ORDER}, or too little trained to tell",
                    f"try a longer text; then {COMPARE}",
                )
            )
    gated = [module for module in layer.experts if _is_gated(module)]
    if gated:
        with ExitStack() as restore:
            for module in gated:
                _swap_gate(module)
                restore.callback(_swap_gate, module)
            rise, error = _rise(probe, losses_BS)
        measured.append(f"{rise:+.4f} when gate and up are swapped")
        if rise < -max(SEEN * error, LARGE * loss):
            problems.append(
                check.finding(
                    "fail" if rise < -CERTAIN * error else "warn",
                    f"the loss falls by {-rise:.4f} (standard error {error:.4f}) when gate and up are "
                    "swapped",
                    "the conversion swapped the two halves of gate_up: swap them back",
                )
            )
    yield from problems
    if measured and not problems:
        yield check.passes(f"the loss changes by {' and '.join(measured)}")


def _stands_out(rises: list[float]) -> bool:
    """Return True if one move is much better than the others, like the one that restores an order. If all are
    similar, the router merely chooses badly on this text.
    """
    lowest, *others = sorted(rises)
    return not others or lowest < 2 * min(others[0], 0)


def _losses(probe: Probe, logits_BSV: Tensor) -> Tensor:
    """Return the loss of each predicted token, and NaN for tokens to ignore."""
    losses_BS = cross_entropy_of(logits_BSV, probe.labels_BS, "none").double()
    losses_BS = losses_BS.view_as(probe.labels_BS)
    return losses_BS.masked_fill(probe.labels_BS == IGNORED_TARGET, math.nan)


def _rise(probe: Probe, before_BS: Tensor) -> tuple[float, float]:
    """Return the mean rise of the loss, and its standard error over blocks of successive tokens."""
    rise_BS = _losses(probe, probe.logits(labels=None)) - before_BS
    blocks = rise_BS.split(max(1, rise_BS.numel() // NUM_SAMPLES), dim=1)
    means = torch.cat([block_BS.nanmean(dim=1) for block_BS in blocks])
    means = means[means.isfinite()]
    return rise_BS.nanmean().item(), (means.std() / len(means) ** 0.5).item()


@contextmanager
def _moved_experts(layer: SparseLayer, places: int) -> Iterator[None]:
    """Send each token to the experts that many places after its own."""
    size = layer.num_experts

    def moved(ids: Tensor) -> Tensor:
        return torch.where(ids < size, (ids + places) % size, ids)  # others have no network

    def before_experts(module: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
        hidden, ids_TK, weights_TK = inputs_of_experts(args, kwargs)
        return (hidden, moved(ids_TK), weights_TK), {}

    def after_router(module: Any, args: Any, routing: Routing) -> Routing:
        return replace(routing, expert_ids_N=moved(routing.expert_ids_N))

    with ExitStack() as hooks:
        for module in layer.router_modules if layer.kind == "moe_ffn" else layer.experts:
            if layer.kind == "moe_ffn":
                hooks.enter_context(module.register_forward_hook(after_router))
            else:
                hook = module.register_forward_pre_hook(before_experts, with_kwargs=True)
                hooks.enter_context(hook)
        yield


def _is_gated(module: Any) -> bool:
    if isinstance(module, GatedExperts):
        return True
    has_halves = getattr(module, "has_gate", False) and hasattr(module, "gate_up_proj")
    return has_halves and module.gate_up_proj.is_floating_point()


def _swap_gate(module: Any) -> None:
    """Swap the rows of gate and up in place; twice restores them."""
    if isinstance(module, GatedExperts):
        tensor, dim, is_interleaved = module.gate_up, 1, False
    else:
        tensor, dim = module.gate_up_proj, 2 if module.is_transposed else 1
        is_interleaved = not module.is_concatenated
    index = torch.arange(tensor.shape[dim], device=tensor.device)
    index = index ^ 1 if is_interleaved else index.roll(len(index) // 2)
    tensor.copy_(tensor.index_select(dim, index))
