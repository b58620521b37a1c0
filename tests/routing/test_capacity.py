"""Capacity of an expert: its size, the dropped pairs, and causality."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch

from moe_ffn import FFNConfig, TokenContext, build_ffn
from moe_ffn.config.errors import Unsupported, UseCase
from moe_ffn.outputs import Routing
from moe_ffn.routing import routing_of_pairs
from moe_ffn.routing.capacity import (
    DROP_POLICIES,
    CapacityConfig,
    by_choice,
    by_position,
    by_probability,
    capacity_of,
    drop_over_capacity,
    place_in_queue,
)


def limit_by_position(routing: Routing, factor: float | None) -> Routing:
    return drop_over_capacity(routing, factor, by_position)


def dropped(routing: Routing) -> list[int]:
    return routing.dropped_N.nonzero().flatten().tolist()


@pytest.mark.parametrize(
    "factor",
    [
        *("0.01", "0.1", "0.3", "0.7", "1.0", "1.1", "1.25", "1.3", "2.2", "3.3", "100.0"),
        *("4e-7", "1e-300", "1e-9", "1.2345678", "7e5", "1e9"),
    ],
)
@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
def test_capacity_is_exactly_the_ceiling_of_factor_times_pairs_over_experts(
    make_routing: Any, factor: str, padded: bool
) -> None:
    # 0.3 * 50 is 15.000000596 in float32 and 1.1 * 50 is 55.00000000000001 in float64: either way
    # one place too many.
    sizes = [
        (num_experts, num_tokens) for num_experts in (1, 3, 8) for num_tokens in range(1, 120, 7)
    ]
    for num_experts, num_tokens in (*sizes, (1, 50), (3, 100), (1024, 2000)):
        mask = torch.arange(num_tokens) % 3 < 2 if padded else None
        num_pairs = num_tokens if mask is None else int(mask.sum())
        routing = make_routing([[0]] * num_tokens, num_experts, mask_T=mask)
        limited = limit_by_position(routing, float(factor))
        exact = math.ceil(Fraction(factor) * num_pairs / num_experts)
        assert capacity_of(limited, float(factor)) == exact, (num_tokens, num_experts)
        assert limited.dropped_N.sum() == max(num_pairs - exact, 0)


def test_capacity_of_a_router_whose_pairs_depend_on_the_data_is_exact_too(
    make_routing: Any,
) -> None:
    # The product of both numerators and the number of tokens is more than int64 holds.
    exact = math.ceil(Fraction("7.654321") * Fraction("9.876543") * 130_000 / 1000)
    routing = make_routing([[0]] * 130_000, 1000, capacity_k=7.654321)
    assert capacity_of(routing, 9.876543) == exact


def test_no_factor_is_dropless(make_routing: Any) -> None:
    routing = make_routing([[0], [0], [0]], 3)
    limited = limit_by_position(routing, None)
    assert limited is routing


def test_earlier_positions_are_served_first_across_the_batch(make_routing: Any) -> None:
    # Two sequences of three tokens, all for expert 0 of two: C = ceil(1 * 6 / 2) = 3.
    # position  0  1  2
    # seq 0     t0 t1 t2
    # seq 1     t3 t4 t5
    # Served: t0, t3 (position 0), then t1 (position 1, first sequence). Token-major order would
    # have served t0, t1, t2, and let the end of one sequence displace the start of the other.
    routing = make_routing([[0]] * 6, 2, sequence_length=3)
    assert place_in_queue(routing, by_position(routing)).tolist() == [0, 2, 4, 1, 3, 5]
    assert dropped(limit_by_position(routing, 1.0)) == [2, 4, 5]


# ---------------------------------------------------------------------------- inside the layer


def capacity_layer(**capacity: float) -> Any:
    torch.manual_seed(0)
    config = {"type": "moe", "num_experts": 4, "capacity": capacity}
    return build_ffn(config, d_model=8).double()


def test_training_and_evaluation_have_factors_of_their_own() -> None:
    x = torch.randn(2, 8, 8, dtype=torch.float64)
    layer = capacity_layer(factor=1.0, eval_factor=2.0)
    # 2 * 8 tokens * k 2 = 32 pairs over 4 experts: 8 places, and 16.
    for training, places in ((True, 8), (False, 16)):
        routing = layer.train(training)(x).routing
        assert layer.capacity.expert_capacity(routing, training=training) == places
        assert torch.equal(routing.dropped_N, limit_by_position(routing, places / 8).dropped_N)


def test_evaluation_is_dropless_by_default() -> None:
    x = torch.ones(2, 8, 8, dtype=torch.float64)  # alike, so all go to the same two experts
    layer = capacity_layer(factor=1.0)
    assert layer(x).routing.dropped_N.any()
    evaluated = layer.eval()(x).routing
    assert layer.capacity.expert_capacity(evaluated, training=False) is None
    assert not evaluated.dropped_N.any()


@pytest.mark.parametrize("flattened", [False, True], ids=["batch", "one_sequence"])
@pytest.mark.parametrize(
    ("router", "capacity"),
    # ceil(1 * 16 tokens * k / 4): however many pairs there are.
    [
        ({"type": "relu", "k": 1}, 4),
        ({"type": "relu", "k": 2}, 8),
        ({"type": "top_p", "p": 0.9, "max_k": 2}, 8),
        ({"type": "top_p", "p": 0.9}, 16),
    ],
    ids=lambda value: "-".join(map(str, value.values())) if isinstance(value, dict) else "",
)
def test_choices_of_later_tokens_make_no_room_for_earlier_ones(
    router: dict[str, Any], capacity: int, flattened: bool
) -> None:
    config = {"type": "moe", "num_experts": 4, "router": router, "capacity": {"factor": 1.0}}
    layer: Any = build_ffn(config, d_model=4).double()
    with torch.no_grad():
        layer.router.projection.weight.copy_(torch.eye(4))
    few = torch.tensor([8.0, -8.0, -8.0, -8.0])  # of all experts the first, for both routers
    many = torch.tensor([1.0, 1.0, 1.0, 1.0])
    x = few.double().expand(2, 8, 4).clone()
    altered = x.clone()
    altered[:, 5:] = many
    if flattened:
        x, altered = x.view(1, 16, 4), altered.view(1, 16, 4)
    first = 5
    before, after = layer(x), layer(altered)
    assert after.routing.active_N.sum() > before.routing.active_N.sum()
    for routing in (before.routing, after.routing):
        assert capacity_of(routing, 1.0) == capacity
    torch.testing.assert_close(after.hidden[:, :first], before.hidden[:, :first], rtol=0, atol=0)


def test_tokens_flattened_by_the_caller_keep_their_positions() -> None:
    # Someone who calls the layer with (T, D) says how long a sequence is.
    x = torch.ones(2, 4, 8, dtype=torch.float64)
    layer = capacity_layer(factor=1.0)
    whole = layer(x).routing
    flat = layer(x.view(8, 8), TokenContext(sequence_length=4)).routing
    assert flat.sequence_length == 4
    assert torch.equal(flat.dropped_N, whole.dropped_N)


# ----------------------------------------------------------------------------- whom a full one drops


def test_by_probability_a_broken_weight_goes_last(make_routing: Any) -> None:
    weights = torch.tensor([torch.nan, 0.1, 0.2, 0.3])
    routing = make_routing([[0]] * 4, 2, weights_N=weights)
    assert dropped(drop_over_capacity(routing, 1.0, by_probability)) == [0, 1]


def test_by_choice_first_choices_stay_before_any_second_one(make_routing: Any) -> None:
    # C = ceil(1 * 6 / 3) = 2 at expert 0: the first choices of tokens 1 and 2, not token 0's second one.
    routing = make_routing([[1, 0], [0, 1], [0, 2]], 3)
    assert dropped(drop_over_capacity(routing, 1.0, by_choice)) == [1]
    assert dropped(drop_over_capacity(routing, 1.0, by_position)) == [4]


def test_by_choice_an_expert_of_every_token_is_no_choice(make_routing: Any) -> None:
    # Expert 2 processes every token; both tokens choose expert 0 first, which has room for one.
    weights = torch.tensor([0.5, 0.9, 0.5, 0.1])
    routing = make_routing([[0, 2], [0, 2]], 3, num_always=1, weights_N=weights)
    assert dropped(drop_over_capacity(routing, 1.0, by_choice)) == [2]


def test_random_drops_follow_positions_in_evaluation() -> None:
    layer = build_ffn(
        {"type": "moe", "num_experts": 4, "capacity": {"eval_factor": 0.5, "drop": "random"}},
        d_model=8,
    ).eval()
    x = torch.randn(2, 8, 8)
    first, second = layer(x), layer(x)
    assert torch.equal(first.hidden, second.hidden)
    assert first.routing is not None
    position_N = first.routing.token_indices_N % 8
    assert position_N[first.routing.dropped_N].float().mean() > position_N.float().mean()


@pytest.mark.parametrize("drop", DROP_POLICIES)
def test_drop_policies_are_causal_exactly_if_their_config_claims_it(drop: str) -> None:
    config = {"type": "moe", "num_experts": 4, "capacity": {"factor": 0.5, "drop": drop}}
    layer = build_ffn(config, d_model=8).double()
    torch.manual_seed(1)
    x = torch.randn(4, 10, 8, dtype=torch.float64)
    changed = 0.0
    for seed in range(8):
        altered = x.clone()
        altered[:, 5:] = 3 * torch.randn(4, 5, 8, dtype=torch.float64)
        hidden = []
        for version in (x, altered):
            torch.manual_seed(seed)  # the same lots
            hidden.append(layer(version).hidden[:, :5])
        changed = max(changed, (hidden[0] - hidden[1]).abs().max().item())
    is_causal = FFNConfig.model_validate(config).unsupported(UseCase(causal=True)) is None
    assert (changed < 1e-12) == is_causal


def test_without_a_factor_every_policy_is_causal() -> None:
    for drop in DROP_POLICIES:
        config = FFNConfig.model_validate({"type": "moe", "capacity": {"drop": drop}})
        assert config.unsupported(UseCase(causal=True)) is None


def test_a_fixed_number_of_pairs_of_each_sequence() -> None:
    """Queues follow positions within one sequence, in training and evaluation alike."""
    config = CapacityConfig(per_sequence=2)
    # Two sequences of four tokens, all for expert 0, but the last of each.
    experts = [0, 0, 0, 1, 0, 0, 0, 1]
    ids_T1 = torch.tensor(experts).unsqueeze(-1)
    scores_TE = torch.ones(8, 2)
    for context, dropped in (
        (TokenContext(sequence_length=4), [2, 6]),
        (TokenContext(sequence_length=8), [2, 4, 5, 6]),
        (TokenContext(sequence_length=4, mask=torch.tensor([False] + [True] * 7)), [6]),
    ):
        routing = routing_of_pairs(scores_TE[:, :1], ids_T1, scores_TE, scores_TE, context)
        for training in (True, False):
            limited = config.apply_to(routing, training=training)
            assert limited.dropped_N.nonzero().flatten().tolist() == dropped
            places = config.expert_capacity(routing, training=training)
            assert places == 2 * 8 // (context.sequence_length or 8)
    assert config.is_limited
    assert config.unsupported(UseCase(causal=True)) is None
    assert config.unsupported(UseCase(cached=True)) == Unsupported(
        "per_sequence (2) lets tokens displace each other", "set it to null"
    )


def test_a_fixed_number_of_pairs_keeps_the_largest_weights_and_renormalises_them() -> None:
    config = CapacityConfig(per_sequence=1, drop="probability", renormalize=True)
    # Two sequences of two tokens. Of each, expert 0 keeps its second token and expert 1 its first one.
    weights_TK = torch.tensor([[0.6, 0.4], [0.7, 0.3], [0.2, 0.8], [0.9, 0.1]])
    ids_TK = torch.tensor([[0, 1]] * 4)
    context = TokenContext(sequence_length=2)
    limited = config.apply_to(
        routing_of_pairs(weights_TK, ids_TK, weights_TK, weights_TK, context), training=True
    )
    assert dropped(limited) == [0, 3, 4, 7]
    assert limited.weights_N[limited.computed_N].tolist() == pytest.approx([1] * 4)
