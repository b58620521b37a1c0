"""Mixture-of-depths: what passes, what passes by, and what the block inside sees of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ffn import TokenContext, build_ffn

EXPERT_CHOICE = {"type": "expert_choice", "k": 0.5, "score": "sigmoid"}
RELU = {"type": "relu", "k": 0.5}


def build(router: dict[str, Any], ffn: Any = "swiglu") -> Any:
    torch.manual_seed(0)
    config = {"type": "mixture_of_depths", "ffn": ffn, "router": router}
    return build_ffn(config, d_model=8).double()


def tokens(seed: int = 1) -> Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chosen_and_weights(ffn: Any, x: Tensor, router: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Weights from the router's matrix alone: the best half of each sequence, or the positive ones."""
    logits = (x @ ffn.router.projection.weight.T).squeeze(-1)
    if router is RELU:
        return logits > 0, logits.relu()
    ranks = logits.argsort(dim=1, descending=True).argsort(dim=1)
    return ranks < 3, logits.sigmoid()


def test_a_mixture_inside_routes_the_chosen_alone_and_reports_it() -> None:
    moe = {"type": "moe", "num_experts": 4}
    ffn, x = build(EXPERT_CHOICE, moe), tokens()
    output = ffn(x)
    assert list(output.routings) == ["routing", "inner"]
    assert output.routing is output.routings["routing"]
    inner = output.routings["inner"]
    assert inner.num_real_tokens == 6  # half of 12
    assert inner.active_N.sum() == 12  # k = 2
    assert ffn.routers() == {"routing": ffn.router, "inner": ffn.ffn.router}
    relu = build(RELU, moe)(x)
    assert int(relu.routings["inner"].num_real_tokens) == int(relu.routing.active_N.sum())


def test_token_ids_go_with_their_tokens() -> None:
    moe = {"type": "moe", "num_experts": 4, "router": "hash"}
    ffn, x = build(EXPERT_CHOICE, moe), tokens()
    ids = torch.arange(12).view(2, 6)
    output = ffn(x, TokenContext(token_ids=ids))
    chosen, _ = chosen_and_weights(ffn, x, EXPERT_CHOICE)
    wanted = ffn.ffn.router(x[chosen], TokenContext(token_ids=ids[chosen])).expert_ids_N
    inner = output.routings["inner"]
    assert inner.expert_ids_N[inner.active_N].equal(wanted)


def test_nobody_chosen_gives_zero_and_zero_gradients() -> None:
    ffn = build(RELU)
    with torch.no_grad():
        ffn.router.projection.weight.zero_()
    output = ffn(tokens())
    assert output.hidden.count_nonzero() == 0
    output.hidden.sum().backward()
    for name, parameter in ffn.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.count_nonzero() == 0, name
