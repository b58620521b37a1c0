"""Blocks inside each other against the same by hand; what a mixture of depths shows the block inside."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ffn import TokenContext, build_ffn

B, S, D = 2, 9, 6
PEER: dict[str, Any] = {
    "type": "moe",
    "num_experts": 9,
    "router": {"type": "product_key", "k": 2, "num_heads": 2, "d_query": 4},
    "experts": "single_neuron",
}
THRESHOLD: dict[str, Any] = {
    "type": "moe",
    "num_experts": 4,
    "router": {"type": "expert_threshold", "k": 2},
    "experts": {"type": "swiglu", "d_ff": 4},
}
TOP_K: dict[str, Any] = {
    **THRESHOLD,
    "router": {"type": "top_k", "k": 2},
    "shared_expert": {"type": "swiglu", "d_ff": 4},
}
GATES: dict[str, Any] = {
    "expert choice": {"type": "expert_choice", "k": 0.5, "score": "sigmoid"},
    "relu": {"type": "relu", "k": 0.5},
    "threshold": {"type": "expert_threshold", "k": 0.5},
}


def chain(ffn: dict[str, Any]) -> dict[str, Any]:
    return {"type": "chain_of_experts", "rounds": 3, "ffn": ffn}


def depths(gate: str, ffn: Any) -> dict[str, Any]:
    return {"type": "mixture_of_depths", "router": GATES[gate], "ffn": ffn}


def ngrams(ffn: Any) -> dict[str, Any]:
    small = {"num_heads": 2, "num_rows": 10, "row_width": 3, "kernel_size": 2}
    return {"type": "ngram_memory", **small, "ffn": ffn}


COMPOSED: dict[str, dict[str, Any]] = {
    "chain of top-k with a shared expert": chain(TOP_K),
    "chain of product keys": chain(PEER),
    "chain of thresholds": chain(THRESHOLD),
    "n-grams around a chain": ngrams(chain(THRESHOLD)),
    "n-grams around a chain of product keys": ngrams(chain(PEER)),
    "depths of a gated block": depths("expert choice", "swiglu"),
    "depths of a chain": depths("threshold", chain(THRESHOLD)),
    "depths of a chain of product keys": depths("relu", chain(PEER)),
    "depths of product keys": depths("threshold", PEER),
    "depths of thresholds": depths("relu", THRESHOLD),
    "depths of n-grams": depths("relu", ngrams("dense")),
    "n-grams around depths": ngrams(depths("threshold", PEER)),
}


def built(config: dict[str, Any]) -> Any:
    """Build a block in float64 with random weights and thresholds."""
    torch.manual_seed(0)
    block = build_ffn(config, D).double()
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.normal_(std=0.5)
        for name, buffer in block.named_buffers():
            if name.endswith("threshold_E"):
                buffer.uniform_(-0.3, 0.3)
            elif name.endswith("num_updates_E"):
                buffer.fill_(10**6)
    return block


def weights_of(router: Any, x_SD: Tensor) -> Tensor:
    """(S, E), what each expert's output is multiplied by, 0 where it is not chosen."""
    kind = router.config.type
    if kind == "product_key":
        query_SHQ = (x_SD @ router.query.weight.T).view(len(x_SD), 2, 4)
        first_SHn = query_SHQ[..., :2] @ router.sub_keys[0, 0].T
        second_SHn = query_SHQ[..., 2:] @ router.sub_keys[0, 1].T
        scores_SHE = (first_SHn[..., :, None] + second_SHn[..., None, :]).flatten(2)
        left_out = scores_SHE < scores_SHE.sort(dim=-1).values[..., -2:-1]
        return scores_SHE.masked_fill(left_out, -torch.inf).softmax(dim=-1).sum(dim=1)
    logits_SE = x_SD @ router.projection.weight.T
    if kind == "top_k":
        scores_SE = logits_SE.softmax(dim=-1)
        return scores_SE * (scores_SE >= scores_SE.sort(dim=-1).values[:, -2:-1])
    if kind == "expert_choice":
        scores_SE = logits_SE.sigmoid()
        return scores_SE * (scores_SE >= scores_SE.sort(dim=0).values[-math.ceil(len(x_SD) / 2)])
    if kind == "relu":
        return logits_SE.relu()
    return torch.where(logits_SE >= router.threshold_E, logits_SE.sigmoid(), 0)


def of_expert(experts: Any, e: int, x_SD: Tensor) -> Tensor:
    if experts.config.type == "single_neuron":
        hidden_S1 = F.gelu(x_SD @ experts.up.weight[e])[:, None]
        return hidden_S1 * experts.down.weight[e]
    hidden_SF = F.silu(x_SD @ experts.gate[e].T) * (x_SD @ experts.up[e].T)
    return hidden_SF @ experts.down[e].T


def mixture_by_hand(block: Any, router: Any, x_SD: Tensor) -> Tensor:
    weights_SE = weights_of(router, x_SD)
    outputs = [of_expert(block.experts, e, x_SD) for e in range(weights_SE.shape[1])]
    routed_SD = (weights_SE.unsqueeze(-1) * torch.stack(outputs, dim=1)).sum(dim=1)
    return (
        routed_SD if block.shared_expert is None else routed_SD + block.shared_expert(x_SD).hidden
    )


def by_hand(block: Any, config: Any, x_SD: Tensor, ids_S: Tensor) -> Tensor:
    """Return the output for one sequence without padding."""
    if isinstance(config, str):
        return block(x_SD).hidden
    if config["type"] == "moe":
        return mixture_by_hand(block, block.router, x_SD)
    if config["type"] == "chain_of_experts":
        for router in [block.ffn.router, *block.later_routers]:
            x_SD = x_SD + mixture_by_hand(block.ffn, router, x_SD)
        return x_SD
    if config["type"] == "ngram_memory":
        read_1SD = block.read(x_SD[None], TokenContext(token_ids=ids_S[None]))
        return by_hand(block.ffn, config["ffn"], x_SD, ids_S) + read_1SD[0]
    weights_S1 = weights_of(block.router, x_SD)
    chosen = weights_S1[:, 0].nonzero()[:, 0]
    assert 0 < len(chosen) < len(x_SD)
    passed = by_hand(block.ffn, config["ffn"], x_SD[chosen], ids_S[chosen])
    return torch.zeros_like(x_SD).index_copy(0, chosen, weights_S1[chosen] * passed)


@pytest.mark.parametrize("name", COMPOSED)
def test_output_and_every_gradient_are_those_of_the_composition_by_hand(
    name: str, assert_equal_with_gradients: Any
) -> None:
    config, generator = COMPOSED[name], torch.Generator().manual_seed(1)
    block = built(config)
    x = torch.randn(B, S, D, generator=generator, dtype=torch.float64).requires_grad_()
    ids = torch.randint(5, (B, S), generator=generator)
    lengths, mask = (S, 6), torch.ones(B, S, dtype=torch.bool)
    mask[1, lengths[1] :] = False
    rows = [by_hand(block, config, x[b, :n], ids[b, :n]) for b, n in enumerate(lengths)]
    wanted = torch.stack([F.pad(row, (0, 0, 0, S - len(row))) for row in rows])

    got = block(x, TokenContext(mask, ids)).hidden

    assert_equal_with_gradients(block, x, got, wanted)


EXPERT_CHOICE = {"type": "expert_choice", "k": 0.5, "score": "sigmoid"}
RELU = {"type": "relu", "k": 0.5}


def build(router: dict[str, Any], ffn: Any = "swiglu") -> Any:
    torch.manual_seed(0)
    config = {"type": "mixture_of_depths", "ffn": ffn, "router": router}
    return build_ffn(config, d_model=8).double()


def tokens(seed: int = 1) -> Tensor:
    return torch.randn(2, 6, 8, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def chosen_and_weights(ffn: Any, x: Tensor, router: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Weights from only the router's matrix: the best half of each sequence, or the positive ones."""
    logits = (x @ ffn.router.projection.weight.T).squeeze(-1)
    if router is RELU:
        return logits > 0, logits.relu()
    ranks = logits.argsort(dim=1, descending=True).argsort(dim=1)
    return ranks < 3, logits.sigmoid()


def test_a_mixture_inside_routes_only_the_chosen_and_reports_it() -> None:
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


def test_no_chosen_expert_gives_zero_output_and_gradients() -> None:
    ffn = build(RELU)
    with torch.no_grad():
        ffn.router.projection.weight.zero_()
    output = ffn(tokens())
    assert output.hidden.count_nonzero() == 0
    output.hidden.sum().backward()
    for name, parameter in ffn.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.count_nonzero() == 0, name
