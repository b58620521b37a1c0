from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.utils._pytree as pytree

from moe_ffn.dispatch import make_plan


def test_pairs_are_sorted_by_expert_and_keep_token_order(make_routing: Any) -> None:
    # pair    0  1  2  3  4  5
    # token   0  0  1  1  2  2
    # expert  2  0  0  1  2  0   ->  expert 0: pairs 1, 2, 5; expert 1: 3; expert 2: 0, 4
    weights = torch.tensor([0.0, 0.1, 0.2, 0.3, 0.4, 0.5])
    plan = make_plan(make_routing([[2, 0], [0, 1], [2, 0]], 3, weights_N=weights))
    assert plan.token_indices_N.tolist() == [0, 1, 2, 1, 0, 2]
    assert plan.weights_N.tolist() == weights[[1, 2, 5, 3, 0, 4]].tolist()
    assert plan.pair_ids_N.tolist() == [1, 2, 5, 3, 0, 4]
    assert plan.offsets_E.tolist() == [3, 4, 6]
    assert plan.offsets_E.dtype == torch.int32


def test_dropped_and_padded_pairs_stand_behind_with_weight_zero(make_routing: Any) -> None:
    # Tokens 0 to 3 go to experts 1, 0, 1, 0; token 0's pair is dropped, token 3 is padding.
    routing = make_routing(
        [[1], [0], [1], [0]],
        2,
        dropped_N=torch.tensor([True, False, False, False]),
        mask_T=torch.tensor([True, True, True, False]),
    )
    plan = make_plan(routing)
    assert plan.offsets_E.tolist() == [1, 2]
    assert plan.token_indices_N.tolist() == [1, 2, 0, 3]
    assert plan.weights_N.tolist() == [1, 1, 0, 0]


def test_weights_carry_the_gradient_of_computed_pairs_alone(make_routing: Any) -> None:
    weights = torch.tensor([0.5, 0.25, 0.125], requires_grad=True)
    routing = make_routing(
        [[1], [0], [0]], 2, weights_N=weights, dropped_N=torch.tensor([False, False, True])
    )
    plan = make_plan(routing)  # pairs 1, 0, then the dropped 2
    (plan.weights_N * torch.tensor([10.0, 20.0, 30.0])).sum().backward()
    assert weights.grad is not None
    assert weights.grad.tolist() == [20, 10, 0]


def test_a_plan_without_pairs_ends_every_expert_at_zero(make_routing: Any) -> None:
    empty = torch.zeros(0)
    routing = make_routing(
        [[0]],
        3,
        token_indices_N=empty.long(),
        expert_ids_N=empty.long(),
        weights_N=empty,
        dropped_N=empty.bool(),
    )
    assert make_plan(routing).offsets_E.tolist() == [0, 0, 0]


@pytest.mark.parametrize("num_experts", [1, 7])
def test_plan_is_a_pytree(make_routing: Any, num_experts: int) -> None:
    plan = make_plan(make_routing([[0]] * 4, num_experts))
    leaves, structure = pytree.tree_flatten(plan)
    assert len(leaves) == 4
    assert pytree.tree_unflatten(leaves, structure) == plan
