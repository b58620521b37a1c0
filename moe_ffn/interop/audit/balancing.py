"""Checks of an audit on balancing: is there a loss or a rule, and is its value that of the formula?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ffn.balancing.losses import BALANCING_LOSSES, pooled_load_balancing_loss
from moe_ffn.ffn.base import FFNBlock
from moe_ffn.interop.audit.findings import BALANCING, Finding
from moe_ffn.interop.audit.probe import Outputs, Probe, mode
from moe_ffn.interop.audit.structure import option_of
from moe_ffn.outputs import Routing
from moe_ffn.routing.base import Router, RouterConfig
from moe_ffn.routing.relu import ReLURouterConfig
from moe_ffn.training.objective import IGNORED_TARGET, ObjectiveConfig

COEFFICIENTS = (
    "router_aux_loss_coef",
    "aux_loss_alpha",
    "moe_aux_loss_coeff",
    "router_aux_loss_coeff",
)
"""Names of the loss's weight in configs of transformers."""

TOLERANCE = 3e-3
"""Largest relative difference of two values of the loss that is rounding; in 16 bits ten times that."""

_ADVICE = (
    "compare with moe_ffn.balancing.losses.pooled_load_balancing_loss, which is 1 at balance; transformers' "
    "value is k times larger"
)


def check_balancing(probe: Probe, *, trains: bool, accumulation: int) -> Iterator[Finding]:
    """Check the balancing of a model of transformers.

    Args:
        trains: True if the model is about to be trained.
        accumulation: batches per optimizer step.
    """
    if not hasattr(probe.config, "output_router_logits"):
        yield from _without_a_loss(probe, trains)
        return
    coefficient = option_of(probe.config, COEFFICIENTS, float)
    if not (probe.config.output_router_logits and coefficient):
        why = "output_router_logits is false" if coefficient else "the weight of the loss is 0"
        yield BALANCING.finding(
            "fail" if trains else "pass",
            f"the model's loss has no balancing loss: {why}",
            "set config.output_router_logits to True and config.router_aux_loss_coef above 0 before you train"
            if trains
            else "",
        )
        return
    if probe.has_encoder:
        yield BALANCING.skips("the losses of an encoder and a decoder are not compared")
        return
    with mode(probe.model, training=False), torch.no_grad():
        yield from _of_transformers(probe, coefficient, accumulation)


def _without_a_loss(probe: Probe, trains: bool) -> Iterator[Finding]:
    """Check models whose forward pass has no balancing loss."""
    biased = [name for name, _ in probe.model.named_buffers() if "correction_bias" in name]
    biased += [name for name, _ in probe.model.named_parameters() if "correction_bias" in name]
    ours = all(layer.kind == "moe_ffn" for layer in probe.layers)
    if ours:
        sentence = (
            "our blocks return their routings; the balancing loss is added by the training loop"
        )
        advice = "add load_balancing_loss of each routing to your loss, or use a router with a bias"
    elif biased:
        sentence = "routers have a correction bias, which no forward pass changes"
        advice = "update it after each step (moe_ffn.balancing.bias_rules): transformers does not"
    else:
        sentence = "the model has neither a balancing loss nor a correction bias"
        advice = (
            "add a balancing loss to your training loop: moe_ffn.interop.watch gives the routings"
        )
    yield BALANCING.finding("warn" if trains else "pass", sentence, advice if trains else "")


def _of_transformers(probe: Probe, coefficient: float, accumulation: int) -> Iterator[Finding]:
    labels = probe.batch.get("labels")
    if labels is None:
        labels = probe.ids_BS.masked_fill(~probe.mask_BS, IGNORED_TARGET)
    passed = probe.run(labels=labels, output_router_logits=True)
    value = getattr(passed.output, "aux_loss", None)
    routings = _as_counted_there(passed)
    if not isinstance(value, Tensor):
        yield BALANCING.fails(
            "output_router_logits is true, but the model returns no aux_loss",
            "the class computes none: add a loss to your training loop",
        )
        return
    if not routings:
        why = "the routing cannot be recorded, so the loss cannot be compared"
        yield BALANCING.skips(why)
        return
    yield from _value(value.item(), routings, _tolerance(probe))
    yield from _gradient(probe, labels)
    yield from _padding(probe, labels)
    yield from _weight(probe, passed, coefficient)
    yield from _accumulation(probe, labels, value.item(), coefficient, accumulation)


def _as_counted_there(passed: Outputs) -> list[Routing]:
    """Return the routings whose loss transformers computes: the best experts by a softmax of the logits.

    Routers with a sigmoid or a correction bias choose otherwise, but their loss counts these experts.
    """
    counted: list[Routing] = []
    for routing in passed.routings.values():
        if routing.logits_TE is not None:
            scores_TE = routing.logits_TE.softmax(dim=-1)
            k = len(routing.expert_ids_N) // max(routing.num_tokens, 1)
            ids_TK = scores_TE.topk(k, dim=-1).indices
            counted.append(replace(routing, expert_ids_N=ids_TK.flatten(), scores_TE=scores_TE))
    return counted


def _expected(routings: list[Routing]) -> float:
    """Return the loss in the convention of transformers: k times ours, over the tokens of all layers."""
    k = len(routings[0].expert_ids_N) / max(routings[0].num_tokens, 1)
    return k * pooled_load_balancing_loss(routings).item()


def _is_close(one: float, other: float, tolerance: float) -> bool:
    return abs(one - other) <= tolerance * max(abs(one), abs(other), 1e-6)


def _tolerance(probe: Probe) -> float:
    dtypes = {parameter.dtype for layer in probe.layers for parameter in layer.routers.values()}
    return TOLERANCE if dtypes <= {torch.float32, torch.float64} else 10 * TOLERANCE


def _value(value: float, routings: list[Routing], tolerance: float) -> Iterator[Finding]:
    ours, expected = pooled_load_balancing_loss(routings).item(), _expected(routings)
    sentence = f"aux_loss is {value:.4f}; k times ours on the same routing is {expected:.4f}"
    if _is_close(value, expected, tolerance):
        yield BALANCING.passes(sentence)
        return
    ratio = value / expected if expected else float("inf")
    known = (
        "it is ours without the factor k"
        if _is_close(value, ours, tolerance)
        else f"{ratio:.3g} times as large"
    )
    yield BALANCING.fails(f"{sentence}: {known}", _ADVICE)


def _gradient(probe: Probe, labels: Tensor) -> Iterator[Finding]:
    """Check that the loss reaches the routers."""
    routers = [p for layer in probe.layers for p in layer.routers.values() if p.requires_grad]
    if not routers:
        return
    with torch.enable_grad():
        value = probe.run(labels=labels, output_router_logits=True).output.aux_loss
    if value.requires_grad:
        grads = torch.autograd.grad(value, routers, allow_unused=True)
        if any(grad is not None for grad in grads):
            return
    yield BALANCING.fails(
        "aux_loss gives the routers no gradient, so it has no effect",
        "look for detach or no_grad between the routers' logits and the loss",
    )


def _padding(probe: Probe, labels: Tensor) -> Iterator[Finding]:
    """Compare the loss of a batch with its loss when random padding is appended."""
    ids_BS, mask_BS = probe.ids_BS, probe.mask_BS
    length = max(ids_BS.shape[1] // 2, 1)
    others = [
        name
        for name, value in probe.batch.items()
        if name not in ("input_ids", "attention_mask", "labels")
        and isinstance(value, Tensor)
        and value.shape[-1:] == ids_BS.shape[1:]
    ]
    if others:
        why = f"the batch cannot be padded, because it has {', '.join(others)}"
        yield BALANCING.skips(why)
        return
    limit = getattr(probe.config, "max_position_embeddings", None) or 1 << 30
    if ids_BS.shape[1] + length > limit:
        yield BALANCING.skips("the batch leaves no room for padding")
        return
    mask = F.pad(mask_BS.long(), (0, length), value=0)
    passed = probe.run(
        input_ids=F.pad(ids_BS, (0, length), value=int(ids_BS[0, 0])),
        attention_mask=mask,
        labels=F.pad(labels, (0, length), value=IGNORED_TARGET),
        output_router_logits=True,
    )
    padded, tolerance = passed.output.aux_loss.item(), _tolerance(probe)
    routings = _as_counted_there(passed)
    expected = _expected(routings)
    sentence = (
        f"with {length} padding tokens per sequence aux_loss is {padded:.4f}, without counting them "
        f"{expected:.4f}"
    )
    if _is_close(padded, expected, tolerance):
        yield BALANCING.passes(sentence)
    else:
        counts = (
            "padding counts"
            if _is_close(padded, _expected([_unmasked(r) for r in routings]), tolerance)
            else "it differs"
        )
        yield BALANCING.fails(
            f"{sentence}: {counts}", "pass the attention mask to the loss, or train without padding"
        )


def _unmasked(routing: Routing) -> Routing:
    return replace(routing, mask_T=None)


def _weight(probe: Probe, passed: Outputs, coefficient: float) -> Iterator[Finding]:
    """Compare what the model's loss adds to the cross-entropy with the weighted balancing loss."""
    loss, value = passed.output.loss.item(), passed.output.aux_loss.item()
    cross_entropy = probe.cross_entropy(passed.logits_BSV).item()
    beside, expected = loss - cross_entropy, coefficient * value
    weighted = f"{coefficient:g} times aux_loss is {expected:.2e}"
    sentence = f"the loss exceeds the cross-entropy by {beside:.2e}; {weighted}"
    if abs(beside - expected) <= _tolerance(probe) * abs(expected) + 1e-5 * abs(cross_entropy):
        yield BALANCING.passes(sentence)
        return
    yield BALANCING.fails(
        sentence,
        "the loss that trains the model is not the cross-entropy plus the weighted aux_loss; add it yourself",
    )


def _accumulation(
    probe: Probe, labels: Tensor, value: float, coefficient: float, accumulation: int
) -> Iterator[Finding]:
    """Compare the loss of a batch that is the whole step with that of a batch that is a part of it.

    transformers' Trainer passes `num_items_in_batch`, the predicted tokens of the whole step, and then adds
    the losses of the batches without dividing them.
    """
    if accumulation == 1:
        return
    num_predicted = int((labels[:, 1:] != IGNORED_TARGET).sum())

    def loss_of(num_items: int) -> float:
        passed = probe.run(labels=labels, output_router_logits=True, num_items_in_batch=num_items)
        return passed.output.loss.item()

    whole, part = loss_of(num_predicted), loss_of(num_predicted * accumulation)
    excess, weighted = part - whole / accumulation, coefficient * value
    if abs(excess) <= _tolerance(probe) * weighted + 1e-6 * abs(whole):
        sentence = f"in a step of {accumulation} batches each adds 1 / {accumulation} of the balancing loss"
        yield BALANCING.passes(sentence)
        return
    factor = accumulation * (excess / weighted + 1 / accumulation)
    yield BALANCING.fails(
        f"in a step of {accumulation} batches the balancing loss counts {factor:.3g} times, because "
        "num_items_in_batch divides the cross-entropy alone",
        f"divide config.router_aux_loss_coef by {accumulation}",
    )


def check_objective(probe: Probe, objective: ObjectiveConfig) -> Iterator[Finding]:
    """Check that the objective of a run of ours balances its experts."""
    weights = {
        name: getattr(objective, name)
        for name, loss in BALANCING_LOSSES.items()
        if not loss.weight_set_by_rule and name.startswith("load") and getattr(objective, name)
    }
    unbalanced = [
        name
        for layer in probe.layers
        if isinstance(layer.block, FFNBlock)
        for name, router in layer.block.routers().items()
        if _needs_a_loss(router)
    ]
    if weights or not unbalanced:
        parts = [f"objective.{name} {weight:g}" for name, weight in weights.items()]
        sentence = (
            f"balanced by {' and '.join(parts) or 'the routers: by construction or by a rule'}"
        )
        yield BALANCING.passes(sentence)
        return
    yield BALANCING.fails(
        "objective has neither a balancing loss nor a bias rule for these routers",
        "set objective.load_balance to 0.01, or the router's type to sigmoid_top_k",
    )


def _needs_a_loss(router: Any) -> bool:
    """Return False for a router that has nothing to learn, or that a rule or its own choice balances."""
    config = getattr(router, "config", None)
    if not isinstance(config, RouterConfig):
        return False
    has_rule = config.has_correction_bias or type(router).observe is not Router.observe
    ranks_tokens = bool(config.lookahead_reason)  # an expert takes its share of them
    is_steered = isinstance(config, ReLURouterConfig) or config.is_pairs_only
    return config.learns and not (has_rule or ranks_tokens or is_steered)
