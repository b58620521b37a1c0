"""Checks of an audit on balancing: is there a loss or a rule, and does its value match the formula?"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ffn.balancing.losses import BALANCING_LOSSES, pooled_load_balancing_loss
from moe_ffn.interop.audit.findings import BALANCING, Finding
from moe_ffn.interop.audit.probe import Outputs, Probe, mode
from moe_ffn.interop.audit.structure import option_of
from moe_ffn.outputs import Routing
from moe_ffn.routing.base import Router, RouterConfig
from moe_ffn.routing.relu import ReLURouterConfig
from moe_ffn.training.objective import IGNORED_TARGET, ObjectiveConfig

COEFFICIENTS = (
    *("router_aux_loss_coef", "aux_loss_alpha"),
    *("moe_aux_loss_coeff", "router_aux_loss_coeff"),
)
"""Names of the loss's weight in configs of transformers."""

TOLERANCE = 3e-3
"""Largest relative difference of two values of the loss that is rounding; in 16 bits ten times that."""


def check_balancing(probe: Probe, *, trains: bool, accumulation: int) -> Iterator[Finding]:
    """Check the balancing of a model of transformers that `trains`, by steps of `accumulation` batches."""
    coefficient = option_of(probe.config, COEFFICIENTS, float)
    is_on = getattr(probe.config, "output_router_logits", None)
    # Many configs, such as DeepSeek-V3's, have the option although their model ignores it.
    takes_option = "output_router_logits" in inspect.signature(probe.base.forward).parameters
    if is_on is None or not (takes_option or (is_on and coefficient)):
        sentence, advice = _without_a_loss(probe)
        yield BALANCING.finding("warn" if trains else "skip", sentence, advice)
    elif not (is_on and coefficient):
        why = "output_router_logits is false" if coefficient else "the weight of the loss is 0"
        sentence = f"the model's loss has no balancing loss: {why}"
        advice = "set config.output_router_logits to True and config.router_aux_loss_coef above 0"
        yield BALANCING.finding("fail" if trains else "skip", sentence, advice)
    elif probe.has_encoder:
        yield BALANCING.skips("the losses of an encoder and a decoder are not compared")
    else:
        with mode(probe.model, training=False), torch.no_grad():
            yield from _of_transformers(probe, coefficient, accumulation)


def _without_a_loss(probe: Probe) -> tuple[str, str]:
    """Return a sentence and advice for a model whose forward pass has no balancing loss."""
    if all(layer.kind == "moe_ffn" for layer in probe.layers):
        return (
            "our blocks return their routings; the balancing loss is added by the training loop",
            "add load_balancing_loss of each routing to your loss, or use a router with a bias",
        )
    if any("correction_bias" in name for name in probe.model.state_dict()):
        return (
            "routers have a correction bias, which no forward pass changes",
            "update it after each step (moe_ffn.balancing): transformers does not",
        )
    return (
        "the model has neither a balancing loss nor a correction bias",
        "add a balancing loss to your training loop: moe_ffn.interop.watch gives the routings",
    )


def _of_transformers(probe: Probe, coefficient: float, accumulation: int) -> Iterator[Finding]:
    passed = _run(probe)
    value = getattr(passed.output, "aux_loss", None)
    if not isinstance(value, Tensor):
        yield BALANCING.fails(
            "output_router_logits is true, but the model returns no aux_loss",
            "the class computes none: add a loss to your training loop",
        )
        return
    if not any(routing.logits_TE is not None for routing in passed.routings.values()):
        yield BALANCING.skips("the routing cannot be recorded, so the loss cannot be compared")
        return
    yield _value(probe, value.item(), _expected(passed))
    yield from _gradient(probe)
    yield from _padding(probe)
    yield _weight(probe, passed, coefficient * value.item())
    if accumulation > 1:
        yield _accumulation(probe, coefficient * value.item(), accumulation)


def _run(probe: Probe, **changes: Any) -> Outputs:
    """Run the model with its losses."""
    return probe.run(
        **{"labels": probe.unshifted_labels_BS, "output_router_logits": True, **changes}
    )


def _expected(passed: Outputs, *, counts_padding: bool = False) -> float:
    """Return the loss as transformers defines it: k times ours over the tokens of all layers. It counts the
    best experts by a softmax of the logits, also if routers choose by other scores.
    """
    counted: list[Routing] = []
    k = 0
    for routing in passed.routings.values():
        if routing.logits_TE is not None:
            scores_TE = routing.logits_TE.softmax(dim=-1)
            k = len(routing.expert_ids_N) // max(routing.num_tokens, 1)
            ids_N = scores_TE.topk(k, dim=-1).indices.flatten()
            mask_T = None if counts_padding else routing.mask_T
            counted.append(replace(routing, expert_ids_N=ids_N, scores_TE=scores_TE, mask_T=mask_T))
    return k * pooled_load_balancing_loss(counted).item()


def _tolerance(probe: Probe) -> float:
    dtypes = {parameter.dtype for layer in probe.layers for parameter in layer.routers.values()}
    return TOLERANCE if dtypes <= {torch.float32, torch.float64} else 10 * TOLERANCE


def _value(probe: Probe, value: float, expected: float) -> Finding:
    ratio = value / expected if expected else math.inf
    return BALANCING.requires(
        math.isclose(value, expected, rel_tol=_tolerance(probe)),
        f"aux_loss is {value:.4f}, {ratio:.3g} times the expected {expected:.4f}",
        "compare with k times moe_ffn.balancing.pooled_load_balancing_loss, which is 1 at balance",
    )


def _gradient(probe: Probe) -> Iterator[Finding]:
    """Check that the loss reaches the routers."""
    routers = [p for layer in probe.layers for p in layer.routers.values() if p.requires_grad]
    if not routers:
        return
    with torch.enable_grad():
        value = _run(probe).output.aux_loss
    grads = torch.autograd.grad(value, routers, allow_unused=True) if value.requires_grad else ()
    if all(grad is None for grad in grads):
        yield BALANCING.fails(
            "aux_loss gives the routers no gradient, so it has no effect",
            "look for detach or no_grad between the routers' logits and the loss",
        )


def _padding(probe: Probe) -> Iterator[Finding]:
    """Append padding to the batch, cut to leave room for it, and compare its loss with ours."""
    ids_BS = probe.ids_BS
    limit = getattr(probe.config, "max_position_embeddings", None) or 2 * ids_BS.shape[1]
    kept = min(ids_BS.shape[1], max(2 * limit // 3, 1))
    length = min(max(kept // 2, 1), limit - kept)
    others = [
        name
        for name, value in probe.batch.items()
        if name not in ("input_ids", "attention_mask", "labels")
        and isinstance(value, Tensor)
        and value.shape[-1:] == ids_BS.shape[1:]
    ]
    if others:
        yield BALANCING.skips(f"the batch cannot be padded, because it has {', '.join(others)}")
        return
    if length < 1:
        yield BALANCING.skips("the model's length leaves no room for padding")
        return
    passed = _run(
        probe,
        input_ids=F.pad(ids_BS[:, :kept], (0, length), value=int(ids_BS[0, 0])),
        attention_mask=F.pad(probe.mask_BS[:, :kept].long(), (0, length), value=0),
        labels=F.pad(probe.unshifted_labels_BS[:, :kept], (0, length), value=IGNORED_TARGET),
    )
    padded, tolerance = passed.output.aux_loss.item(), _tolerance(probe)
    expected, with_padding = _expected(passed), _expected(passed, counts_padding=True)
    is_right = math.isclose(padded, expected, rel_tol=tolerance)
    is_counted = math.isclose(padded, with_padding, rel_tol=tolerance) and not is_right
    yield BALANCING.requires(
        is_right,
        f"with {length} padding tokens per sequence aux_loss is {padded:.4f}, without counting them "
        f"{expected:.4f}{': padding counts' if is_counted else ''}",
        "pass the attention mask to the loss, or train without padding",
    )


def _weight(probe: Probe, passed: Outputs, weighted: float) -> Finding:
    """Compare what the model's loss adds to the cross-entropy with the weighted balancing loss."""
    cross_entropy = probe.cross_entropy(passed.logits_BSV).item()
    added = passed.output.loss.item() - cross_entropy
    return BALANCING.requires(
        abs(added - weighted) <= _tolerance(probe) * abs(weighted) + 1e-5 * abs(cross_entropy),
        f"the loss exceeds the cross-entropy by {added:.2e}; the weighted aux_loss is {weighted:.2e}",
        "the loss is not the cross-entropy plus the weighted aux_loss: add it yourself",
    )


def _accumulation(probe: Probe, weighted: float, accumulation: int) -> Finding:
    """Compare the loss of a batch that is the whole step with that of a part of it. transformers' Trainer
    gives `num_items_in_batch`, the tokens of the step, and sums the losses of its batches.
    """
    num_predicted = int((probe.labels_BS != IGNORED_TARGET).sum())
    whole, part = (
        _run(probe, num_items_in_batch=num_predicted * batches).output.loss.item()
        for batches in (1, accumulation)
    )
    excess = part - whole / accumulation
    factor = accumulation * excess / weighted + 1 if weighted else math.nan
    return BALANCING.requires(
        abs(excess) <= _tolerance(probe) * weighted + 1e-6 * abs(whole),
        f"in a step of {accumulation} batches the balancing loss counts {factor:.3g} times",
        f"num_items_in_batch divides the cross-entropy alone: divide config.router_aux_loss_coef by "
        f"{accumulation}",
    )


def check_objective(probe: Probe, objective: ObjectiveConfig) -> Iterator[Finding]:
    """Check that the objective of a moe_ffn run balances its experts."""
    weights = {
        name: getattr(objective, name)
        for name, loss in BALANCING_LOSSES.items()
        if not loss.weight_set_by_rule and name.startswith("load") and getattr(objective, name)
    }
    routers = [router for layer in probe.layers for router in layer.router_modules]
    if weights or not any(map(_needs_a_loss, routers)):
        parts = [f"objective.{name} {weight:g}" for name, weight in weights.items()]
        balance = " and ".join(parts) or "the routers: by construction or by a rule"
        yield BALANCING.passes(f"balanced by {balance}")
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
