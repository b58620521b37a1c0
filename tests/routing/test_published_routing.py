"""Our routers and capacities choose, weigh and drop as the functions of published libraries do.

The numbers are what each library's own function returned for the logits of `published_logits_LTE`, of
which these use layer 0: Megatron-LM d98e8a6, DeepSpeed edaa722, transformers 5.23.0. The losses that
they return beside them are in `tests/balancing/test_published_losses.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from identity_router import experts_of, load_of, real_pairs, route
from torch import Tensor

from moe_ffn.capacity import Priority, by_position, by_probability, limit
from moe_ffn.outputs import Routing
from moe_ffn.routing.config import (
    GroupsConfig,
    SigmoidTopKRouterConfig,
    SinkhornRouterConfig,
    TopKRouterConfig,
)

# Printed to six digits (half a unit of the last: 5e-7), of float32 numbers up to 1.3.
PRINTED = 1e-6

PUBLISHED: dict[str, Any] = {
    "megatron get_capacity(T*k=24,E=8,cf=1.25)": 4,
    "megatron probs_row0_post_softmax_k2": [0, 0.560818, 0.439182, 0, 0, 0, 0, 0],
    "megatron probs_row0_pre_softmax_k2": [0, 0.368572, 0.288633, 0, 0, 0, 0, 0],
    "megatron probs_row0_sigmoid_bias(0.3cos e)_groups4_top2_scale2.5_k2": [
        *(1.179416, 1.320584, 0, 0, 0, 0, 0, 0)
    ],
    "megatron counts_same": [8, 4, 0, 0, 0, 3, 6, 3],
    "megatron cf1.0_probs_policy_kept_per_expert_k2": [3, 3, 3, 3, 2, 3, 2, 2],
    "megatron cf1.0_before": [4, 3, 4, 3, 2, 4, 2, 2],
    "megatron cf1.0_capacity": 3,
    "megatron sinkhorn_argmax_layer0": [1, 5, 6, 4, 3, 7, 7, 6, 7, 1, 0, 6],
    "deepspeed top1_capacity_cf1": 2,
    "deepspeed top1_counts": [4, 3, 0, 1, 1, 0, 1, 2],
    "deepspeed top1_kept": 9,
    "deepspeed top2_capacity_cf1": 3,
    "deepspeed top2_kept": 21,
    "deepspeed top2_counts": [4, 3, 4, 3, 2, 4, 2, 2],
    "deepspeed topk2_probs capacity": 3,
    "deepspeed topk2_probs kept": 21,
    "deepspeed topk2_probs gates_token0": [0.560818, 0.439182],
    "deepspeed topk2_probs gates_rowsum_min": 1.0,
    "deepspeed topk2_position capacity": 3,
    "deepspeed topk2_position kept": 21,
    "deepspeed topk2_position gates_token0": [0.560818, 0.439182],
    "deepspeed topk2_position gates_rowsum_min": 1.0,
    # An identity for the router's weight.
    "hf_deepseek_v3 token0_idx": [0, 1],
    "hf_deepseek_v3 token0_w": [1.179416, 1.320584],
    "hf_deepseek_v3 counts": [8, 4, 0, 0, 0, 2, 6, 4],
}

Ours = Callable[[Tensor], Any]
"""From logits (T, E) to the published number."""


def top_k(k: int, **options: Any) -> Callable[[Tensor], Routing]:
    return lambda logits_TE: route(TopKRouterConfig(k=k, **options), logits_TE)


def grouped(score_top: int | None) -> Callable[[Tensor], Routing]:
    """DeepSeek-V3's router with a correction bias of 0.3 cos(e), the best 2 of 4 groups, scale 2.5."""
    groups = GroupsConfig(num_groups=4, keep=2, score_top=score_top)
    config = SigmoidTopKRouterConfig(k=2, groups=groups, scale=2.5)
    bias = [0.3 * math.cos(expert) for expert in range(8)]
    return lambda logits_TE: route(config, logits_TE, bias=bias)


# The two libraries disagree about a group's score, and so about the counts.
MEGATRONS_GROUPS, HUGGING_FACES_GROUPS = grouped(score_top=None), grouped(score_top=2)


def limited(
    routed: Callable[[Tensor], Routing], factor: float = 1.0, drop: Priority = by_position
) -> Callable[[Tensor], Routing]:
    return lambda logits_TE: limit(routed(logits_TE), factor, drop)


def gates(drop: Priority) -> Callable[[Tensor], Routing]:
    """DeepSpeed's top-k: the chosen probabilities over the sum of those of them that were kept."""
    chosen = top_k(2, renormalize=True)
    return lambda logits_TE: limit(chosen(logits_TE), 1.0, drop, renormalize=True)


def row_0(routed: Callable[[Tensor], Routing]) -> Ours:
    """The weights of the first token, under the numbers of its experts."""

    def ours(logits_TE: Tensor) -> list[float]:
        weights = dict(real_pairs(routed(logits_TE))[0])
        return [weights.get(expert, 0.0) for expert in range(logits_TE.shape[-1])]

    return ours


def capacity(routed: Callable[[Tensor], Routing]) -> Ours:
    def ours(logits_TE: Tensor) -> int:
        places = routed(logits_TE).capacity
        assert places is not None
        return int(places)

    return ours


def chosen_per_expert(routed: Callable[[Tensor], Routing]) -> Ours:
    return lambda logits_TE: load_of(routed(logits_TE))


def kept_per_expert(routed: Callable[[Tensor], Routing]) -> Ours:
    def ours(logits_TE: Tensor) -> list[int]:
        routing = routed(logits_TE)
        return routing.expert_ids_N[routing.computed_N].bincount(minlength=8).tolist()

    return ours


def kept(routed: Callable[[Tensor], Routing]) -> Ours:
    return lambda logits_TE: sum(kept_per_expert(routed)(logits_TE))


def experts_of_token_0(routed: Callable[[Tensor], Routing]) -> Ours:
    return lambda logits_TE: sorted(experts_of(routed(logits_TE))[0])


def weights_of_token_0(routed: Callable[[Tensor], Routing]) -> Ours:
    """In the order of its experts' numbers, as `experts_of_token_0`."""
    return lambda logits_TE: [weight for _, weight in sorted(real_pairs(routed(logits_TE))[0])]


def smallest_sum_of_weights(routed: Callable[[Tensor], Routing]) -> Ours:
    def ours(logits_TE: Tensor) -> float:
        routing = routed(logits_TE)
        kept_N = torch.where(routing.computed_N, routing.weights_N, 0)
        return torch.zeros(12).index_add(0, routing.token_ids_N, kept_N).min().item()

    return ours


def balanced_choice(logits_TE: Tensor) -> list[int]:
    routing = route(SinkhornRouterConfig(k=1), logits_TE, training=True)
    return routing.expert_ids_N.tolist()


OURS: dict[str, Ours] = {
    "megatron get_capacity(T*k=24,E=8,cf=1.25)": capacity(limited(top_k(2), factor=1.25)),
    "megatron probs_row0_post_softmax_k2": row_0(top_k(2, softmax="after")),
    "megatron probs_row0_pre_softmax_k2": row_0(top_k(2, softmax="before")),
    "megatron probs_row0_sigmoid_bias(0.3cos e)_groups4_top2_scale2.5_k2": row_0(MEGATRONS_GROUPS),
    "megatron counts_same": chosen_per_expert(MEGATRONS_GROUPS),
    "megatron cf1.0_probs_policy_kept_per_expert_k2": kept_per_expert(
        limited(top_k(2), drop=by_probability)
    ),
    "megatron cf1.0_before": chosen_per_expert(limited(top_k(2), drop=by_probability)),
    "megatron cf1.0_capacity": capacity(limited(top_k(2))),
    "megatron sinkhorn_argmax_layer0": balanced_choice,
    "deepspeed top1_capacity_cf1": capacity(limited(top_k(1))),
    "deepspeed top1_counts": chosen_per_expert(limited(top_k(1))),
    "deepspeed top1_kept": kept(limited(top_k(1))),
    "deepspeed top2_capacity_cf1": capacity(limited(top_k(2))),
    "deepspeed top2_kept": kept(limited(top_k(2))),
    "deepspeed top2_counts": chosen_per_expert(limited(top_k(2))),
    "deepspeed topk2_probs capacity": capacity(gates(by_probability)),
    "deepspeed topk2_probs kept": kept(gates(by_probability)),
    "deepspeed topk2_probs gates_token0": weights_of_token_0(gates(by_probability)),
    "deepspeed topk2_probs gates_rowsum_min": smallest_sum_of_weights(gates(by_probability)),
    "deepspeed topk2_position capacity": capacity(gates(by_position)),
    "deepspeed topk2_position kept": kept(gates(by_position)),
    "deepspeed topk2_position gates_token0": weights_of_token_0(gates(by_position)),
    "deepspeed topk2_position gates_rowsum_min": smallest_sum_of_weights(gates(by_position)),
    "hf_deepseek_v3 token0_idx": experts_of_token_0(HUGGING_FACES_GROUPS),
    "hf_deepseek_v3 token0_w": weights_of_token_0(HUGGING_FACES_GROUPS),
    "hf_deepseek_v3 counts": chosen_per_expert(HUGGING_FACES_GROUPS),
}


def test_every_published_number_is_compared_with_one_of_ours() -> None:
    assert OURS.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("entry", PUBLISHED)
def test_ours_is_the_published_number(entry: str, published_logits_LTE: Tensor) -> None:
    ours = OURS[entry](published_logits_LTE[0])
    assert ours == pytest.approx(PUBLISHED[entry], rel=0, abs=PRINTED)
