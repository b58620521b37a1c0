"""Routings made by hand and by the real router, for every room's tests."""

from __future__ import annotations

from typing import Any, Protocol

import pytest
import torch
from torch import Tensor

from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing.config import TopKRouterConfig


class MakeRouting(Protocol):
    def __call__(
        self, expert_ids_TK: list[list[int]], num_experts: int, **replaced: Any
    ) -> Routing: ...


class RouteLogits(Protocol):
    def __call__(
        self, logits_TE: Tensor, k: int, renormalize: bool = False, mask: Tensor | None = None
    ) -> Routing: ...


@pytest.fixture
def make_routing() -> MakeRouting:
    """A Routing in which token t goes to `expert_ids_TK[t]`, each pair with weight 1/K.

    One sequence, no padding, undecided scores, unless `replaced` says otherwise.
    """

    def make(expert_ids_TK: list[list[int]], num_experts: int, **replaced: Any) -> Routing:
        num_tokens, k = len(expert_ids_TK), len(expert_ids_TK[0])
        values: dict[str, Any] = {
            "token_ids_N": torch.arange(num_tokens).repeat_interleave(k),
            "expert_ids_N": torch.tensor(expert_ids_TK).flatten(),
            "weights_N": torch.full((num_tokens * k,), 1 / k),
            "dropped_N": torch.zeros(num_tokens * k, dtype=torch.bool),
            "logits_TE": torch.zeros(num_tokens, num_experts),
            "scores_TE": torch.full((num_tokens, num_experts), 1 / num_experts),
            "mask_T": None,
            "sequence_length": num_tokens,
        }
        return Routing(**{**values, **replaced})

    return make


@pytest.fixture
def route_logits() -> RouteLogits:
    """The real top-k router on given logits: its projection is the identity."""

    def route(
        logits_TE: Tensor, k: int, renormalize: bool = False, mask: Tensor | None = None
    ) -> Routing:
        num_experts = logits_TE.shape[-1]
        router = TopKRouterConfig(k=k, renormalize=renormalize).build(num_experts, num_experts)
        with torch.no_grad():
            (weight,) = router.parameters()
            weight.copy_(torch.eye(num_experts))
        return router(logits_TE, TokenContext(mask=mask))

    return route


@pytest.fixture
def published_logits_LTE() -> Tensor:
    """The logits behind the published numbers: 3 layers, 12 tokens, 8 experts."""
    layer = torch.arange(3).view(3, 1, 1)
    token = torch.arange(12).view(1, 12, 1)
    expert = torch.arange(8).view(1, 1, 8)
    return 2 * torch.sin(0.7 * (token + 1) * (expert + 1) + 1.3 * layer)
