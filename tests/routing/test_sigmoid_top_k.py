"""Sigmoid top-k is DeepSeek-V3's: its bias chooses and never weighs, and stays float32."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from moe_ffn import build_ffn
from moe_ffn.routing import RouterConfig, SigmoidTopKRouterConfig, TopKRouterConfig
from moe_ffn.routing.base import Router
from tests.helpers.identity_router import identity_router, random_logits, real_pairs, route

# sigmoid(0) = 0.5, sigmoid(ln 3) = 0.75, sigmoid(-ln 3) = 0.25
LOGITS = torch.tensor([[1.0, 3.0, 1 / 3]]).log()


@pytest.mark.parametrize(
    ("options", "pairs"),
    [
        ({"renormalize": False}, [(1, 0.75), (0, 0.5)]),
        ({}, [(1, 0.6), (0, 0.4)]),  # (0.75, 0.5) / 1.25
        ({"scale": 2.5}, [(1, 1.5), (0, 1.0)]),
        ({"renormalize": False, "scale": 2.0}, [(1, 1.5), (0, 1.0)]),
    ],
    ids=["plain", "renormalized", "renormalized_scaled", "scaled"],
)
def test_choice_and_weights_equal_those_worked_by_hand(
    options: dict[str, Any], pairs: list[tuple[int, float]]
) -> None:
    routing = route(SigmoidTopKRouterConfig(**options), LOGITS)
    (got,) = real_pairs(routing)
    assert [e for e, _ in got] == [e for e, _ in pairs]
    assert [w for _, w in got] == pytest.approx([w for _, w in pairs])
    torch.testing.assert_close(routing.scores_TE, torch.tensor([[0.5, 0.75, 0.25]]))


def test_the_bias_changes_the_choice_and_never_a_weight() -> None:
    # score + bias = (0.5, 0.75, 0.85): experts 2 and 1, weighted (0.25, 0.75) / 1 as without the bias.
    routing = route(SigmoidTopKRouterConfig(), LOGITS, bias=[0.0, 0.0, 0.6])
    (pairs,) = real_pairs(routing)
    assert [e for e, _ in pairs] == [2, 1]
    assert [w for _, w in pairs] == pytest.approx([0.25, 0.75])
    torch.testing.assert_close(routing.scores_TE, torch.tensor([[0.5, 0.75, 0.25]]))


@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("k", [2, 3, 6])
def test_it_equals_a_loop_in_plain_python(k: int, renormalize: bool) -> None:
    logits = random_logits(40, 6)
    bias = [0.3, -0.2, 0.0, 0.1, -0.4, 0.25]
    config = SigmoidTopKRouterConfig(k=k, renormalize=renormalize, scale=1.5)
    got = real_pairs(route(config, logits, bias=bias))
    # The bias is float32, and is added to scores in float64.
    bias32 = torch.tensor(bias).tolist()
    for row, pairs in zip(logits.tolist(), got, strict=True):
        scores = [1 / (1 + math.exp(-z)) for z in row]
        chosen = sorted(range(6), key=lambda e: -(scores[e] + bias32[e]))[:k]
        total = sum(scores[e] for e in chosen) if renormalize else 1
        assert [e for e, _ in pairs] == chosen
        assert [w for _, w in pairs] == pytest.approx([1.5 * scores[e] / total for e in chosen])


def test_scores_too_small_for_float32_give_finite_weights() -> None:
    routing = route(SigmoidTopKRouterConfig(), torch.full((1, 4), -1e4))
    assert routing.weights_N.isfinite().all()


# -------------------------------------------------------------------------- the correction bias

BIASED: dict[str, RouterConfig] = {
    "sigmoid_top_k": SigmoidTopKRouterConfig(),
    "top_k": TopKRouterConfig(correction_bias=True),
}
# 1 + 2**-20 needs float32; bfloat16 would round it to 1 and float16 too.
BITS = [1 + 2**-20, -3 - 2**-20, 1e-8, 0.1]


@pytest.fixture(params=BIASED.values(), ids=list(BIASED))
def biased(request: pytest.FixtureRequest) -> Router:
    router = identity_router(request.param, 4)
    assert router.correction_bias_E is not None
    router.correction_bias_E.copy_(torch.tensor(BITS))
    return router


MOVES: dict[str, Callable[[nn.Module], nn.Module]] = {
    "bfloat16": lambda module: module.bfloat16(),
    "half": lambda module: module.half(),
    "double": lambda module: module.double(),
    "half_and_back": lambda module: module.half().float(),
    "to_dtype": lambda module: module.to(torch.bfloat16),
    "to_device_and_dtype": lambda module: module.to("cpu", torch.float16),
    "deepcopy": lambda module: copy.deepcopy(module).bfloat16(),
    "inside_a_model": lambda module: nn.Sequential(module).bfloat16()[0],
}


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_the_correction_bias_keeps_every_bit(
    biased: Router, move: Callable[[nn.Module], nn.Module]
) -> None:
    moved = move(biased)
    bias = moved.correction_bias_E
    assert isinstance(bias, torch.Tensor)
    assert bias.dtype == torch.float32
    assert torch.equal(bias, torch.tensor(BITS))
    assert dict(moved.named_buffers())["correction_bias_E"] is bias


def test_the_correction_bias_survives_the_meta_device(biased: Router) -> None:
    state = biased.state_dict()
    assert "correction_bias_E" in state
    with torch.device("meta"):
        empty = identity_router(SigmoidTopKRouterConfig(), 4)
    loaded = empty.bfloat16().to_empty(device="cpu")
    loaded.load_state_dict(state)
    assert loaded.correction_bias_E is not None
    assert loaded.correction_bias_E.dtype == torch.float32
    assert torch.equal(loaded.correction_bias_E, torch.tensor(BITS))


def test_the_correction_bias_is_stored_and_is_no_parameter(biased: Router) -> None:
    assert torch.equal(biased.state_dict()["correction_bias_E"], torch.tensor(BITS))
    assert "correction_bias_E" not in dict(biased.named_parameters())
    other = copy.deepcopy(biased)
    assert other.correction_bias_E is not None
    other.correction_bias_E.zero_()
    other.load_state_dict(biased.state_dict())
    assert torch.equal(other.correction_bias_E, torch.tensor(BITS))


def test_forward_leaves_the_correction_bias_alone() -> None:
    layer = build_ffn({"type": "moe", "num_experts": 4, "router": "sigmoid_top_k"}, d_model=8)
    bias = layer.get_buffer("router.correction_bias_E")
    layer.train()(torch.randn(2, 5, 8)).hidden.square().sum().backward()
    assert bias.tolist() == [0, 0, 0, 0]
    assert not bias.requires_grad


def test_a_router_without_the_option_has_no_bias() -> None:
    router = identity_router(SigmoidTopKRouterConfig(correction_bias=False), 4)
    assert router.correction_bias_E is None
    assert list(router.state_dict()) == ["projection.weight"]
    assert not SigmoidTopKRouterConfig(correction_bias=False).has_correction_bias
    assert SigmoidTopKRouterConfig().has_correction_bias
    assert not TopKRouterConfig().has_correction_bias
