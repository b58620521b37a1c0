"""Properties of every MoE layer and every batch, tested on random ones.

`--hypothesis-profile many` tries each sentence below on twenty times as many.

T tokens, E experts, N (token, expert) pairs
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from fractions import Fraction
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from moe_ffn import TokenContext
from moe_ffn.balancing.losses import BALANCING_LOSSES
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.metrics.modular import CoactivationMetrics, LoadMetrics, TokenMetrics
from moe_ffn.outputs import ChosenRouting, NoisyRouting, Routing
from tests.helpers.any_moe import (
    D_MODEL,
    EMPTY_SHAPES,
    FEW,
    LAYOUTS,
    PER_TOKEN,
    SOME,
    TOLERANCE,
    AnyMoE,
    any_moe,
    assert_close,
)

# ------------------------------------------------------------------------------- what is promised


@SOME
@given(any_moe())
def test_routed_and_dropped_pairs_are_those_the_router_promised(drawn: AnyMoE) -> None:
    layer, x = drawn.layer(), drawn.tokens()
    promised = drawn.promised(layer, x)
    _, routing = drawn.call(layer, x)
    for name in ("token_ids_N", "expert_ids_N", "real_N"):
        assert torch.equal(getattr(routing, name), getattr(promised, name)), name
    assert not (routing.computed_N & routing.dropped_N).any()
    assert torch.equal(routing.computed_N | routing.dropped_N, promised.real_N)


@SOME
@given(any_moe())
def test_a_router_promises_each_token_what_its_rule_says(drawn: AnyMoE) -> None:
    promised = drawn.promised(drawn.layer(), drawn.tokens())
    pairs = real_pairs(promised)
    assert len(set(pairs)) == len(pairs), "a token has an expert twice"
    if drawn.router_type == "expert_choice":
        check_expert_choice(drawn, promised, Counter(expert for _, expert in pairs))
        return
    num_experts_of = Counter(token for token, _ in pairs)
    for token in range(promised.num_tokens):
        if promised.mask_T is not None and not promised.mask_T[token]:
            assert num_experts_of[token] == 0
        else:
            check_number_of_experts(drawn, promised, token, num_experts_of[token])


def check_number_of_experts(drawn: AnyMoE, promised: Routing, token: int, number: int) -> None:
    router = drawn.config["router"]
    if drawn.router_type in ("relu", "expert_threshold"):
        assert promised.logits_TE is not None
        assert number == (promised.logits_TE[token] > 0).sum()
    elif drawn.router_type == "top_p":
        assert promised.scores_TE is not None
        scores = sorted(promised.scores_TE[token].double().tolist(), reverse=True)
        max_k = router["max_k"] or len(scores)
        assert 1 <= number <= max_k
        assert sum(scores[: number - 1]) < router["p"] + 1e-6  # scores are float32
        assert number == max_k or sum(scores[:number]) > router["p"] - 1e-6
    else:
        assert number == router.get("k", 1)


def check_expert_choice(drawn: AnyMoE, promised: Routing, load: Counter[int]) -> None:
    """Every expert takes its share of each group, rounded up."""
    real_T = torch.ones(promised.num_tokens, dtype=torch.bool)
    real_T = real_T if promised.mask_T is None else promised.mask_T
    size = drawn.shape[-1] if drawn.config["router"]["among"] == "sequence" else len(real_T)
    share = Fraction(str(drawn.config["router"]["k"])) / drawn.num_routable
    places = sum(math.ceil(share * int(group.sum())) for group in real_T.split(size))
    assert [load[e] for e in range(drawn.num_routable)] == [places] * drawn.num_routable


@SOME
@given(any_moe())
def test_a_full_expert_keeps_exactly_those_it_serves_first(drawn: AnyMoE) -> None:
    layer, x = drawn.layer(), drawn.tokens()
    _, routing = drawn.call(layer, x)
    real = routing.real_N.nonzero().flatten().tolist()
    kept = set(routing.computed_N.nonzero().flatten().tolist())
    capacity = drawn.config["capacity"]
    factor = capacity["factor" if drawn.training else "eval_factor"]
    if factor is None:
        assert kept == set(real)
        return
    num_pairs = Fraction(len(real))
    if getattr(routing, "capacity_k", None) is not None:
        assert isinstance(routing, ChosenRouting)
        num_pairs = int(routing.num_real_tokens) * Fraction(str(routing.capacity_k))
    places = math.ceil(Fraction(str(factor)) * num_pairs / drawn.num_routable)
    assert layer.capacity.places(routing, training=drawn.training) == places

    # Serving is by the weights before they were scaled up for the survivors.
    weights = drawn.promised(layer, x).weights_N.tolist()
    queue_of = {
        "position": lambda n: (int(routing.token_ids_N[n]) % drawn.shape[-1], n),
        "probability": lambda n: (-weights[n], n),
    }
    drop = capacity["drop"] if drawn.training or capacity["drop"] != "random" else "position"
    for expert in range(drawn.num_routable):
        mine = [n for n in real if routing.expert_ids_N[n] == expert]
        served = [n for n in mine if n in kept]
        assert len(served) == min(places, len(mine))
        if drop != "random":
            assert set(served) == set(sorted(mine, key=queue_of[drop])[:places])


@SOME
@given(any_moe())
def test_a_token_without_experts_gets_nothing(drawn: AnyMoE) -> None:
    without_shared = {
        k: v for k, v in drawn.config.items() if k not in ("shared_expert", "combine")
    }
    drawn = replace(drawn, config=without_shared)
    output, routing = drawn.call(drawn.layer(), drawn.tokens())
    served = routing.token_ids_N[routing.computed_N].unique()
    idle_T = torch.ones(routing.num_tokens, dtype=torch.bool).index_fill(0, served, False)
    assert output.hidden.reshape(-1, D_MODEL)[idle_T].count_nonzero() == 0
    assert output.hidden.isfinite().all()


# ----------------------------------------------------------------------------- one token by itself


@SOME
@given(any_moe(routers=PER_TOKEN, dropless=True, training=False))
def test_a_permutation_of_the_tokens_permutes_the_output(drawn: AnyMoE) -> None:
    layer, x, context = drawn.layer(), drawn.tokens(), drawn.context()
    output, routing = drawn.call(layer, x)
    order_T = torch.randperm(
        routing.num_tokens, generator=torch.Generator().manual_seed(drawn.seed)
    )

    def permuted(values: Tensor) -> Tensor:
        return values.flatten(0, 1)[order_T].view_as(values)

    assert context.token_ids is not None
    mask = None if context.mask is None else permuted(context.mask)
    moved = TokenContext(mask, permuted(context.token_ids))
    permuted_output, permuted_routing = drawn.call(layer, permuted(x), moved)
    experts_TK = routing.expert_ids_N.view(routing.num_tokens, -1)
    assert torch.equal(permuted_routing.expert_ids_N.view_as(experts_TK), experts_TK[order_T])
    assert_close(permuted_output.hidden, permuted(output.hidden), TOLERANCE[drawn.dtype])


BAD_MATES = {"nan": torch.nan, "infinity": torch.inf, "large": 1e30, "zero": 0.0}


@SOME
@given(any_moe(routers=PER_TOKEN, dropless=True, training=False), st.integers(0, 20))
def test_without_capacity_a_token_does_not_see_its_batch_mates(drawn: AnyMoE, number: int) -> None:
    """Not to the bit: how many rows a product has decides the order of its sums."""
    layer, x, context = drawn.layer(), drawn.tokens(), drawn.context()
    b, s = divmod(number % (drawn.shape[0] * drawn.shape[1]), drawn.shape[1])
    wanted = drawn.call(layer, x)[0].hidden[b, s]
    others = {"others": x.flip(-1)} | {
        name: torch.full_like(x, value) for name, value in BAD_MATES.items()
    }
    for changed in others.values():
        changed[b, s] = x[b, s]
        assert_close(drawn.call(layer, changed)[0].hidden[b, s], wanted, TOLERANCE[drawn.dtype])

    token = (slice(b, b + 1), slice(s, s + 1))
    assert context.token_ids is not None
    mask = None if context.mask is None else context.mask[token]
    alone, _ = drawn.call(layer, x[token], TokenContext(mask, context.token_ids[token]))
    assert_close(alone.hidden[0, 0], wanted, TOLERANCE[drawn.dtype])


# ------------------------------------------------------------------------------- odd inputs


def derivatives(
    drawn: AnyMoE, layer: MoEFFN, x: Tensor, context: TokenContext, probe: Tensor
) -> dict[str, Tensor | None]:
    """The output, and d<output, probe>/d(everything)."""
    layer.zero_grad()
    x = x.detach().requires_grad_()  # keeps the strides
    output, _ = drawn.call(layer, x, context)
    output.hidden.backward(probe)
    return {
        "output": output.hidden.detach(),
        "x": x.grad,
        **{name: parameter.grad for name, parameter in layer.named_parameters()},
    }


@FEW
@given(any_moe())
def test_strides_change_nothing(drawn: AnyMoE) -> None:
    layer, context, tokens = drawn.layer(), drawn.context(), drawn.tokens()
    assert context.token_ids is not None
    views = list(LAYOUTS.values())
    for view, gradient_view in zip(views, reversed(views), strict=True):
        x, probe = view(tokens), gradient_view(tokens.flip(-1))
        mask = None if context.mask is None else view(context.mask)
        token_ids = view(context.token_ids)
        seen = TokenContext(mask, token_ids)
        plain = TokenContext(None if mask is None else mask.contiguous(), token_ids.contiguous())
        got = derivatives(drawn, layer, x, seen, probe)
        wanted = derivatives(drawn, layer, x.contiguous(), plain, probe.contiguous())
        for name, value in wanted.items():
            mine = got[name]
            assert (mine is None) == (value is None), name
            if mine is not None and value is not None:
                assert_close(mine, value, TOLERANCE[drawn.dtype])


@SOME
@given(any_moe(shapes=EMPTY_SHAPES))
def test_no_tokens_give_an_empty_output_and_gradients_of_zero(drawn: AnyMoE) -> None:
    layer = drawn.layer()
    output, routing = drawn.call(layer, drawn.tokens())
    assert output.hidden.shape == (*drawn.shape, D_MODEL)
    assert output.hidden.dtype == drawn.dtype
    assert not real_pairs(routing)
    check_losses_and_metrics(drawn, routing)
    check_zero_gradients(layer, output.hidden, routing)


@SOME
@given(any_moe())
def test_padding_alone_gives_zeros_and_gradients_of_zero(drawn: AnyMoE) -> None:
    without_shared = {
        k: v for k, v in drawn.config.items() if k not in ("shared_expert", "combine")
    }
    padding = (True,) * int(torch.Size(drawn.shape).numel())
    drawn = replace(drawn, config=without_shared, padding=padding)
    layer = drawn.layer()
    output, routing = drawn.call(layer, torch.full_like(drawn.tokens(), torch.nan))
    assert output.hidden.count_nonzero() == 0
    assert not real_pairs(routing)
    check_losses_and_metrics(drawn, routing)
    check_zero_gradients(layer, output.hidden, routing)


def check_zero_gradients(layer: MoEFFN, hidden: Tensor, routing: Routing) -> None:
    """Zeros for the experts; for a router whose choice carries no gradient, zeros or none."""
    (hidden.sum() + sum(losses_of(routing).values())).backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None or name.startswith("router."), name
        assert parameter.grad is None or parameter.grad.count_nonzero() == 0, name


def check_losses_and_metrics(drawn: AnyMoE, routing: Routing) -> None:
    for name, value in losses_of(routing).items():
        assert value.isfinite(), name
    for kind in (LoadMetrics, TokenMetrics, CoactivationMetrics):
        metrics: Any = kind(drawn.num_routable)
        metrics.update(routing)
        # Which are not numbers by their own account: see their docstrings.
        unknown = {"capacity_used", "top1_margin", "shared_share"}
        for name, value in metrics.compute().items():
            assert name in unknown or value.isfinite().all(), name


def losses_of(routing: Routing) -> dict[str, Tensor]:
    """Every loss that takes this routing."""
    losses = {name: loss for name, loss in BALANCING_LOSSES.items() if name != "load_cv2"}
    if isinstance(routing, NoisyRouting):
        losses["load_cv2"] = BALANCING_LOSSES["load_cv2"]
    found = {name: loss.value({"layer_00": routing}) for name, loss in losses.items()}
    return {name: value for name, value in found.items() if value is not None}


# -------------------------------------------------------------------------------------- precision


# ---------------------------------------------------------------------------------------- helpers


def real_pairs(routing: Routing) -> list[tuple[int, int]]:
    """(token, expert), of the pairs that the router chose for real tokens."""
    real_N = routing.real_N
    tokens, experts = routing.token_ids_N[real_N].tolist(), routing.expert_ids_N[real_N].tolist()
    return list(zip(tokens, experts, strict=True))
