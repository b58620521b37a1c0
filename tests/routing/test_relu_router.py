"""ReLU routing takes exactly the experts with a positive logit, weighted by it."""

from __future__ import annotations

import torch

from moe_ffn.routing import ReLURouterConfig
from tests.helpers.identity_router import random_logits, real_pairs, route


def test_the_pairs_equal_those_worked_by_hand() -> None:
    logits = torch.tensor([[0.5, -1.0, 0.0, 2.0], [-1.0, -2.0, -0.5, 0.0], [1.0, 1.0, 1.0, 1.0]])
    for training in (True, False):
        routing = route(ReLURouterConfig(), logits, training=training)
        assert real_pairs(routing) == [
            [(0, 0.5), (3, 2.0)],  # 0 is not positive
            [],
            [(0, 1.0), (1, 1.0), (2, 1.0), (3, 1.0)],
        ]
        assert routing.logits_TE is not None
        assert routing.scores_TE is not None
        assert torch.equal(routing.scores_TE, logits.clamp(min=0))
        assert torch.equal(routing.logits_TE, logits)


def test_k_is_a_target_for_the_rule_and_changes_no_pair() -> None:
    logits = random_logits(30, 5)
    few, many = (route(ReLURouterConfig(k=k), logits) for k in (0.5, 4.0))
    assert real_pairs(few) == real_pairs(many)
    assert [getattr(routing, "target_k", None) for routing in (few, many)] == [0.5, 4.0]


def test_a_nan_does_not_pass_as_a_token_that_chose_nobody() -> None:
    logits = torch.zeros(2, 3)
    logits[1] = torch.nan
    chosen = [[e for e, _ in pairs] for pairs in real_pairs(route(ReLURouterConfig(), logits))]
    assert chosen == [[], [0, 1, 2]]
