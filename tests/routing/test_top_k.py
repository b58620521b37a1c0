"""Softmax top-k is that of the papers: before or after selection, renormalised, scaled, biased."""

from __future__ import annotations

import pytest
import torch

from moe_ffn import TokenContext
from moe_ffn.routing import TopKRouterConfig
from moe_ffn.routing.base import RouterLinear
from tests.helpers.identity_router import experts_of, identity_router, random_logits, route


def test_a_learned_bias_is_added_to_the_logits_and_starts_at_zero() -> None:
    router = identity_router(TopKRouterConfig(k=2, bias=True), 3)
    bias = router.get_parameter("projection.bias")
    logits = random_logits(4, 3)
    assert torch.equal(router(logits, TokenContext()).logits_TE, logits)
    with torch.no_grad():
        bias.copy_(torch.tensor([0.5, -0.25, 0.0]))  # exact in float32
    routing = router(logits, TokenContext())
    torch.testing.assert_close(routing.logits_TE, logits + bias.double(), rtol=0, atol=1e-15)
    assert experts_of(routing) == experts_of(route(TopKRouterConfig(k=2), logits + bias.double()))
    assert TopKRouterConfig(bias=True).num_params(16, 8) == 16 * 8 + 8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
def test_jitter_multiplies_what_the_router_sees_and_only_in_training(dtype: torch.dtype) -> None:
    router = identity_router(TopKRouterConfig(k=2, jitter=0.25), 4)
    x = torch.full((500, 4), 2.0, dtype=dtype)
    assert (router(x, TokenContext()).logits_TE == 2).all()
    torch.manual_seed(0)
    jittered = router.train()(x, TokenContext()).logits_TE
    assert (x == 2).all()  # the experts see the token as it was
    # U(1.5, 2.5): deviation 1 / sqrt(12) = 0.2887; of 2000 draws the mean is off by 0.0065.
    assert 1.5 <= jittered.min() < 1.51
    assert 2.49 < jittered.max() <= 2.5
    assert jittered.mean().item() == pytest.approx(2, abs=0.026)
    assert jittered.std().item() == pytest.approx(12**-0.5, rel=0.05)
    assert len(jittered.unique()) > 1900  # drawn for every value, finer than bfloat16


def test_projection_starts_as_nn_linear_does() -> None:
    torch.manual_seed(0)
    weight = RouterLinear(100, 1000).weight
    # U(-1/sqrt(100), 1/sqrt(100)): bound 0.1, deviation 0.1 / sqrt(3) = 0.0577.
    assert weight.abs().max().item() == pytest.approx(0.1, rel=1e-3)
    assert weight.std().item() == pytest.approx(0.0577, rel=1e-2)
