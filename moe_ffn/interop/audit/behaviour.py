"""Checks of an audit on behaviour: causality, independence of other sequences, and health of the routing.

B sequences, S positions, V vocabulary, E experts
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from moe_ffn.balancing.losses import pairs_per_expert
from moe_ffn.interop.audit.findings import CAUSALITY, DETERMINISM, HEALTH, STRUCTURE, Check, Finding
from moe_ffn.interop.audit.layers import SparseLayer
from moe_ffn.interop.audit.probe import Outputs, Probe, mode
from moe_ffn.interop.audit.structure import K_OPTIONS, option_of
from moe_ffn.metrics.functional import load_entropy, logit_max, max_violation, nonfinite_tokens
from moe_ffn.outputs import Routing
from moe_ffn.training.config import AlarmsConfig, highest_violation

MAX_CHANGE = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""Dtype -> largest change of a logit, as a share of the largest logit, that rounding explains."""

SCALE_OPTIONS = ("routed_scaling_factor", "moe_routed_scaling_factor", "route_scale")
"""Names of options in configs of transformers for the factor of the weights."""

MAX_SPREAD = 1e-2
"""Largest relative difference of two weights that rounding to 16 bits explains."""

MIN_PAIRS_PER_EXPERT = 32
"""Mean number of pairs per expert below which an idle expert is no evidence of a defect."""

MAX_SEQUENCES = 4
"""Number of sequences that also run alone, to compare with the batch."""

WORSE_THAN_GUESSING = 1.1
"""Cross-entropy as a multiple of ln(V), which a uniform guess has, above which a model is broken."""


def check_behaviour(probe: Probe) -> Iterator[Finding]:
    """Run the model in evaluation mode: on the batch, with other last tokens, and on single sequences."""
    with mode(probe.model, training=False), torch.no_grad():
        passed = probe.run(labels=None)
        if not passed.logits_BSV.isfinite().all():
            yield HEALTH.fails(
                "the logits contain NaN or infinity", "find the first layer that produces them"
            )
            return
        yield from _declared_routing(probe, passed)
        yield from _causality(probe, passed)
        yield from _determinism(probe, passed)
        yield from _health(probe, passed)


def _declared_routing(probe: Probe, passed: Outputs) -> Iterator[Finding]:
    """Compare the experts per token and their weights with the config."""
    k = option_of(probe.config, K_OPTIONS)
    for layer in probe.layers:
        routing = passed.routings.get(layer.name)
        if routing is None or layer.kind == "moe_ffn":
            continue
        actual = len(routing.expert_ids_N) / max(routing.num_tokens, 1)
        if k not in (None, actual):
            yield STRUCTURE.at(layer.name).fails(
                f"the config declares {k} experts per token, but a token gets {actual:g}",
                "set the same number in the config and in the router",
            )
        yield from _declared_weights(probe, layer, routing)


def _declared_weights(probe: Probe, layer: SparseLayer, routing: Routing) -> Iterator[Finding]:
    """Compare the weights with the config: are they renormalised, and by what are they multiplied?"""
    normalizes = getattr(probe.config, "norm_topk_prob", None)
    scale = option_of(probe.config, SCALE_OPTIONS, int | float)
    weights_TK = routing.weights_N.view(routing.num_tokens, -1)
    factors = weights_TK.sum(dim=-1)
    is_normalized = _is_constant(factors)
    if (
        normalizes is not None
        and 1 < weights_TK.shape[1] < routing.num_experts
        and is_normalized != bool(normalizes)
    ):
        yield STRUCTURE.at(layer.name).fails(
            f"the config has norm_topk_prob {bool(normalizes)}, but the weights of a token sum to "
            f"{factors.min():.3f} to {factors.max():.3f}",
            "set the same value in the config and in the router",
        )
        return
    if scale is None and not normalizes:
        return
    if not is_normalized and routing.scores_TE is not None:
        ids_TK = routing.expert_ids_N.view_as(weights_TK)
        factors = weights_TK / routing.scores_TE.gather(1, ids_TK)
    if not _is_constant(factors):  # scores that are no function of the logits
        return
    declared, factor = scale or 1.0, factors.mean().item()
    if abs(factor / declared - 1) > MAX_SPREAD:
        factor *= _factor_after(probe, layer)
    if abs(factor / declared - 1) > MAX_SPREAD:
        what = "sum to" if is_normalized else "are the scores times"
        yield STRUCTURE.at(layer.name).fails(
            f"the weights of a token {what} {factor:.3g}, but the config scales them by {declared:g}",
            "multiply the weights or the output of the experts by the factor of the config, once",
        )


def _is_constant(values: Tensor) -> bool:
    return bool((values - values.mean()).abs().max() <= MAX_SPREAD * values.abs().max())


def _factor_after(probe: Probe, layer: SparseLayer) -> float:
    """Return the factor by which the block multiplies the output of its experts, as a derivative."""
    outputs: list[Tensor] = []

    def cut(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        outputs.append(output.detach().requires_grad_())
        return outputs[-1]

    def keep(module: nn.Module, args: Any, output: Any) -> None:
        outputs.append(output[0] if isinstance(output, tuple) else output)

    with (
        torch.enable_grad(),
        layer.experts[-1].register_forward_hook(cut),
        layer.block.register_forward_hook(keep),
    ):
        probe.logits(labels=None)
        experts, block = outputs[-2:]  # of the last pass, if a layer runs more than once
        (grad,) = torch.autograd.grad(block.sum(), experts, materialize_grads=True)
        return grad.mean().item()


def _change(probe: Probe, one: Tensor, other: Tensor) -> tuple[float, float]:
    """Return the largest change of two logits as a share of the largest, and the limit."""
    dtype = next(p.dtype for p in probe.model.parameters() if p.is_floating_point())
    limit = MAX_CHANGE.get(dtype, 5e-2)
    if not one.numel():  # a sequence of padding
        return 0.0, limit
    return ((one - other).abs().max() / one.abs().max().clamp(min=1e-30)).item(), limit


def _causality(probe: Probe, passed: Outputs) -> Iterator[Finding]:
    """Alter the second half of each sequence; logits of the first half must not change."""
    config: Any = getattr(probe.base, "config", None)
    is_causal = getattr(config, "causal", "MaskedLM" not in type(probe.base).__name__)
    if not is_causal:
        yield CAUSALITY.skips("the model is not causal")
        return
    ids_BS = probe.ids_BS
    half = ids_BS.shape[1] // 2
    altered = ids_BS.clone()
    altered[:, half:] = (altered[:, half:] * 7 + 13) % passed.logits_BSV.shape[-1]
    again = probe.run(**{probe.ids_name: altered}, labels=None)
    mask = probe.mask_BS[:, :half]
    before, after = (run.logits_BSV[:, :half][mask] for run in (passed, again))
    change, limit = _change(probe, before, after)
    sentence = f"logits change by {size_text(change)} of the largest when later tokens are altered"
    if change > limit:
        layer = _first_flip(passed, again, ids_BS.shape, half)
        where = f"; experts of earlier tokens change first in {layer}" if layer else ""
        sentence += f" (limit {limit:.0e}){where}"
    yield CAUSALITY.requires(
        change <= limit,
        sentence,
        "look for expert choice, a capacity that ranks tokens across a sequence, or an attention mask",
    )


def size_text(change: float) -> str:
    return f"{change:.1e}" if change else "0"


def _first_flip(one: Outputs, other: Outputs, shape: torch.Size, half: int) -> str:
    """Return the first layer in which a token of the first half has other experts; empty if there is none."""
    is_early_T = (torch.arange(shape.numel()) % shape[1]) < half
    for name, routing in one.routings.items():
        again = other.routings[name]
        if routing.expert_ids_N.shape != again.expert_ids_N.shape:
            return name
        early_N = is_early_T.to(routing.token_indices_N.device)[routing.token_indices_N]
        differs_N = routing.expert_ids_N != again.expert_ids_N
        differs_N |= routing.dropped_N != again.dropped_N
        if differs_N[early_N].any():
            return name
    return ""


def _determinism(probe: Probe, passed: Outputs) -> Iterator[Finding]:
    """Run the batch again, and its first sequences alone."""
    again = probe.run(labels=None)
    change, limit = _change(probe, passed.logits_BSV, again.logits_BSV)
    if change > limit:
        yield DETERMINISM.fails(
            f"the same batch gives logits that differ by {change:.1e} of the largest (limit {limit:.0e})",
            "look for dropout, noise or jitter in evaluation",
        )
        return
    if len(probe.ids_BS) < 2:
        yield DETERMINISM.skips("one sequence cannot be compared with a batch; give two or more")
        return
    worst = 0.0
    for row in range(min(len(probe.ids_BS), MAX_SEQUENCES)):
        one = {
            name: value[row : row + 1]
            for name, value in probe.batch.items()
            if isinstance(value, Tensor) and value.ndim and len(value) == len(probe.ids_BS)
        }
        alone = probe.run(**{**one, "labels": None})
        real = probe.mask_BS[row]
        change, _ = _change(probe, passed.logits_BSV[row][real], alone.logits_BSV[0][real])
        worst = max(worst, change)
    yield DETERMINISM.requires(
        worst <= limit,
        f"a sequence alone and in the batch: logits differ by {size_text(worst)} of the largest",
        "look for a capacity or a router that compares tokens of several sequences; remove it in evaluation",
    )


# -- health


def _health(probe: Probe, passed: Outputs) -> Iterator[Finding]:
    loss = probe.cross_entropy(passed.logits_BSV).item()
    guess = math.log(passed.logits_BSV.shape[-1])
    sentence = f"cross-entropy {loss:.3f} nats per token; a uniform guess has {guess:.3f}"
    yield HEALTH.requires(
        loss <= WORSE_THAN_GUESSING * guess,
        sentence,
        "check that the text fits the tokenizer, and compare the weights with their source: moe-ffn diff",
        otherwise="warn",
    )
    if probe.unwatched:
        yield HEALTH.skips(probe.unwatched)
    if too_early := probe.too_early("collapse, dropped pairs and idle experts"):
        yield HEALTH.skips(too_early)
    for name, routing in passed.routings.items():
        yield from _health_of(HEALTH.at(name), routing, is_early=bool(too_early))


def _health_of(check: Check, routing: Routing, *, is_early: bool) -> Iterator[Finding]:
    limits = AlarmsConfig()
    problems: list[Finding] = []
    if broken := int(nonfinite_tokens(routing)):
        sentence = f"{broken} tokens have NaN or infinite router logits"
        problems.append(check.fails(sentence, "look at the layer before"))
    chosen = routing.choices()
    counts_E = pairs_per_expert(chosen).double()
    total, num_experts = counts_E.sum().item(), len(counts_E)
    violation = max_violation(counts_E).item() if total else 0.0
    experts_per_token = total / max(int(routing.num_real_tokens), 1)
    limit = limits.max_violation(num_experts, experts_per_token)
    is_enough = total >= MIN_PAIRS_PER_EXPERT * num_experts
    idle = int((counts_E == 0).sum())
    if violation > limit and is_enough and not is_early:
        share = f"expert {int(counts_E.argmax())} takes {counts_E.max() / total:.0%} of the pairs"
        sentence = f"{share}, MaxVio {violation:.2f} (limit {limit:.2f})"
        highest = highest_violation(num_experts, experts_per_token)
        is_collapsed = violation > (limit + highest) / 2  # less may be how the model was trained
        verdict = "fail" if is_collapsed else "warn"
        problems.append(
            check.finding(verdict, sentence, "the load is uneven: raise the balancing loss")
        )
    if idle and is_enough and not is_early:
        sentence = f"{idle} of {num_experts} experts had none of {int(total):,} pairs"
        advice = (
            "give a longer or more varied text; if they stay idle, balance better or prune them"
        )
        problems.append(check.warns(sentence, advice))
    if (largest := logit_max(routing).item()) > limits.router_logit:
        sentence = f"a router logit of {largest:.3g} (limit {limits.router_logit:g})"
        problems.append(check.warns(sentence, "add a router z-loss"))
    dropped = (routing.dropped_N & routing.active_N).sum().item() / max(total, 1)
    if dropped > limits.dropped_fraction and not is_early:
        sentence = f"{dropped:.0%} of the pairs are dropped"
        problems.append(check.warns(sentence, "raise the capacity factor"))
    yield from problems
    if total and not problems and not is_early:
        entropy = load_entropy(counts_E).item()
        sentence = f"MaxVio {violation:.2f}, entropy of the load {entropy:.3f}, {idle} idle experts"
        if not is_enough:
            sentence += f" (too few tokens to judge: {total / num_experts:.0f} pairs per expert)"
        yield check.passes(sentence)
