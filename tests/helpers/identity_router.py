"""Routers on given logits, and routings as plain Python: what the tests of each router share."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing import RouterConfig
from moe_ffn.routing.base import Router


def identity_router(config: RouterConfig, num_experts: int) -> Router:
    """Build a router in evaluation mode whose logits are its input, since its projection is the identity."""
    router = config.build(num_experts, num_experts)
    with torch.no_grad():
        router.get_parameter("projection.weight").copy_(torch.eye(num_experts))
    return router.eval()


def route(
    config: RouterConfig,
    logits_TE: Tensor,
    *,
    mask: Tensor | None = None,
    sequence_length: int | None = None,
    training: bool = False,
    bias: list[float] | None = None,
) -> Routing:
    router = identity_router(config, logits_TE.shape[-1]).train(training)
    if bias is not None:
        assert router.correction_bias_E is not None
        router.correction_bias_E.copy_(torch.tensor(bias))
    return router(logits_TE, TokenContext(mask=mask, sequence_length=sequence_length))


def real_pairs(routing: Routing) -> list[list[tuple[int, float]]]:
    """Return the real (expert, weight) pairs of each token, in their order."""
    pairs: list[list[tuple[int, float]]] = [[] for _ in range(routing.num_tokens)]
    for token, expert, weight, real in zip(
        routing.token_indices_N.tolist(),
        routing.expert_ids_N.tolist(),
        routing.weights_N.tolist(),
        routing.active_N.tolist(),
        strict=True,
    ):
        if real:
            pairs[token].append((expert, weight))
    return pairs


def experts_of(routing: Routing) -> list[list[int]]:
    """Return the experts of each token's real pairs, in their order."""
    return [[expert for expert, _ in pairs] for pairs in real_pairs(routing)]


def load_of(routing: Routing) -> list[int]:
    return routing.expert_ids_N[routing.active_N].bincount(minlength=routing.num_experts).tolist()


def random_logits(num_tokens: int, num_experts: int, seed: int = 0, scale: float = 1.0) -> Tensor:
    """float64, so that a re-computation in Python floats agrees to rounding."""
    generator = torch.Generator().manual_seed(seed)
    return scale * torch.randn(num_tokens, num_experts, generator=generator, dtype=torch.float64)
