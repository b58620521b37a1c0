"""Sigmoid top-k is DeepSeek-V3's: its bias chooses and never weighs, and stays float32."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import nn

from moe_ffn import build_ffn
from moe_ffn.routing import RouterConfig, SigmoidTopKRouterConfig, TopKRouterConfig
from moe_ffn.routing.base import Router
from tests.helpers.identity_router import identity_router, route


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
    "half_and_back": lambda module: module.half().float(),
    "to_device_and_dtype": lambda module: module.to("cpu", torch.float16),
    "deepcopy": lambda module: copy.deepcopy(module).bfloat16(),
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
