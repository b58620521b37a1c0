"""Balancing losses ignore padding, dropping, copies and empty batches; gradients are correct and finite."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import build_ffn
from moe_ffn.balancing.losses import (
    pairs_per_expert,
    pairs_per_sequence,
    pooled_load_balancing_loss,
)
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing import RouterConfig
from tests.helpers.every_loss import (
    LOAD_BALANCING,
    LOSSES,
    for_every_loss,
    random_logits,
    routing_of,
)
from tests.helpers.every_router import identity_router

# Sums of some ten float64 numbers in another order.
EXACT = 1e-12


def value_and_gradient(
    name: str,
    logits_TE: Tensor,
    mask: Tensor | None = None,
    sequence_length: int | None = None,
    k: int = 2,
) -> tuple[Tensor, Tensor]:
    logits_TE = logits_TE.detach().clone().requires_grad_()
    loss = LOSSES[name](routing_of(logits_TE, k, mask, sequence_length))
    (gradient,) = torch.autograd.grad(loss, logits_TE)
    return loss.detach(), gradient


@pytest.mark.parametrize("padding", [-50.0, 0.0, 1e4])
@pytest.mark.parametrize("name", LOSSES)
def test_padding_changes_neither_value_nor_gradient(name: str, padding: float) -> None:
    # Two sequences of 4 tokens: one padded on the right, one on both sides, and a third of nothing but
    # padding, all with logits that would move every loss if they counted.
    real_BSE = random_logits(8, 4).view(2, 4, 4)
    logits_BSE = torch.full((3, 7, 4), padding, dtype=torch.float64)
    logits_BSE[..., 0] += 10
    mask_BS = torch.zeros(3, 7, dtype=torch.bool)
    for b, start in enumerate([0, 2]):
        logits_BSE[b, start : start + 4] = real_BSE[b]
        mask_BS[b, start : start + 4] = True

    expected, expected_gradient = value_and_gradient(
        name, real_BSE.flatten(0, 1), sequence_length=4
    )
    got, gradient = value_and_gradient(
        name, logits_BSE.flatten(0, 1), mask_BS.flatten(), sequence_length=7
    )
    torch.testing.assert_close(got, expected, rtol=EXACT, atol=EXACT)
    gradient_BSE = gradient.view(3, 7, 4)
    torch.testing.assert_close(gradient_BSE[mask_BS], expected_gradient, rtol=EXACT, atol=EXACT)
    assert gradient_BSE[~mask_BS].count_nonzero() == 0


@pytest.mark.parametrize("num_tokens", [0, 3], ids=["no_tokens", "padding_only"])
@pytest.mark.parametrize("name", LOSSES)
def test_no_real_token_scores_zero_with_a_gradient_of_zero(name: str, num_tokens: int) -> None:
    # Padding of 200 and not 0, so that a missing mask cannot pass for 0.
    logits = torch.full((num_tokens, 4), 200.0)
    nobody = torch.zeros(num_tokens, dtype=torch.bool)
    value, gradient = value_and_gradient(name, logits, nobody)
    assert value.item() == 0
    assert gradient.tolist() == [[0.0] * 4] * num_tokens


@pytest.mark.parametrize("name", LOSSES)
def test_a_single_expert_has_a_gradient_not_a_missing_one(name: str) -> None:
    # Ranks wait for the gradient of every parameter.
    value, gradient = value_and_gradient(name, random_logits(5, 1), k=1)
    assert value.isfinite()
    if name != "router_z" and name != "relu_sparsity":
        # 1 or 0, whatever the logits.
        assert value.item() == pytest.approx(float(name.startswith("load_balance")), abs=EXACT)
        assert gradient.abs().max() < EXACT


@pytest.mark.parametrize("name", LOSSES)
def test_dropping_changes_nothing(name: str) -> None:
    routing = routing_of(random_logits(6, 4), sequence_length=3)
    dropped_N = torch.arange(12) % 3 == 0
    limited = replace(routing, dropped_N=dropped_N)
    assert LOSSES[name](limited).item() == LOSSES[name](routing).item()


TAKE_A_ROUTING: dict[str, Any] = {
    **LOSSES,
    "pairs_per_expert": pairs_per_expert,
    "pairs_per_sequence": pairs_per_sequence,
}


@pytest.mark.parametrize("name", TAKE_A_ROUTING)
def test_losses_reject_values_that_are_not_a_routing(name: str) -> None:
    function = TAKE_A_ROUTING[name]
    output = build_ffn("swiglu", 8)(torch.randn(2, 8))
    for wrong, got in (
        (output.routing, "None, the routing of a block without a router; leave such layers out"),
        (output, "an FFNOutput; use output.routing"),
        (output.hidden, "a value of type Tensor"),
    ):
        with pytest.raises(TypeError, match=rf"^\w+ takes a Routing, but got {got}$"):
            function(wrong)


def test_the_pooled_loss_of_no_layer_is_rejected() -> None:
    with pytest.raises(ValueError, match=r"^load_balance_pooled needs the routing of at least one"):
        pooled_load_balancing_loss([])


READS: dict[str, str] = {
    **dict.fromkeys(LOAD_BALANCING, "scores_TE"),
    "importance_cv2": "weights_N",
    "load_cv2": "selection_probs_TE",
    "router_z": "logits_TE",
    "router_entropy": "scores_TE",
    "relu_sparsity": "scores_TE",
}
"""The one field of a Routing through which the gradient of a loss flows."""


def leaves(routing: Routing) -> tuple[Routing, dict[str, Tensor]]:
    """Copy of the routing whose floating-point tensors are separate leaves."""
    found = {
        field.name: value.detach().clone().requires_grad_()
        for field in fields(routing)
        if isinstance(value := getattr(routing, field.name), Tensor) and value.is_floating_point()
    }
    return replace(routing, **found), found


def padded_routing() -> Routing:
    """Two sequences of 5, padded on the right of one and the left of the other."""
    mask = torch.ones(10, dtype=torch.bool)
    mask[[3, 4, 5]] = False
    return routing_of(random_logits(10, 4), mask=mask, sequence_length=5)


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_flows_through_only_one_field(name: str) -> None:
    routing, by_name = leaves(padded_routing())
    gradients = torch.autograd.grad(
        LOSSES[name](routing), list(by_name.values()), allow_unused=True
    )
    reached = {
        field
        for field, gradient in zip(by_name, gradients, strict=True)
        if gradient is not None and gradient.count_nonzero()
    }
    assert reached == {READS[name]}


@pytest.mark.parametrize("name", LOSSES)
def test_the_gradient_is_that_of_finite_differences(name: str) -> None:
    # In float64 to the end: a float32 number on the way would be off by more than the differences.
    routing = padded_routing()
    values = getattr(routing, READS[name]).detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda changed: LOSSES[name](replace(routing, **{READS[name]: changed})), values
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("name", LOSSES)
def test_the_loss_and_its_gradient_have_the_dtype_of_the_scores(
    name: str, dtype: torch.dtype
) -> None:
    logits = random_logits(6, 4).to(dtype).requires_grad_()
    loss = LOSSES[name](routing_of(logits))
    assert loss.shape == ()
    assert loss.dtype == dtype
    (gradient,) = torch.autograd.grad(loss, logits)
    assert gradient.dtype == dtype


# Each of these makes a score exactly 0 in float32, or all of a token's.
EXTREME: dict[str, tuple[dict[str, Any], list[list[float]]]] = {
    "softmax_sure": ({"type": "top_k", "k": 1}, [[200.0, -200.0, 0.0]] * 3),
    "sigmoid_sure": ({"type": "sigmoid_top_k"}, [[200.0, -200.0, 0.0]] * 3),
    "sigmoid_all_zero": ({"type": "sigmoid_top_k"}, [[-200.0, -300.0, -250.0]]),
    "sigmoid_nearly_zero": ({"type": "sigmoid_top_k"}, [[-95.0, -96.0, -90.0]]),
    "relu_some_zero": ({"type": "relu"}, [[1.0, -1.0, 0.0], [2.0, -3.0, -1.0]]),
    "relu_all_zero": ({"type": "relu"}, [[-1.0, -2.0, -3.0]] * 2),
    "top_p_sure": ({"type": "top_p"}, [[300.0, 0.0, 0.0]] * 2),
}


@pytest.mark.parametrize(("router", "logits"), EXTREME.values(), ids=EXTREME)
@pytest.mark.parametrize("name", [name for name in LOSSES if name != "load_cv2"])
def test_scores_of_zero_have_finite_values_and_gradients(
    name: str, router: dict[str, Any], logits: list[list[float]]
) -> None:
    built = identity_router(RouterConfig.model_validate(router), 3)
    logits_TE = torch.tensor(logits, requires_grad=True)
    routing = built(logits_TE, TokenContext())
    loss = LOSSES[name](for_every_loss(routing, target_k=2))
    (gradient,) = torch.autograd.grad(loss, logits_TE)
    assert loss.isfinite()
    assert gradient.isfinite().all(), gradient
