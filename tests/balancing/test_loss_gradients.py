"""Gradients of every balancing loss: where they flow, that they are right, and that they are finite."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing import RouterConfig
from tests.helpers.every_loss import (
    LOAD_BALANCING,
    LOSSES,
    for_every_loss,
    random_logits,
    routing_of,
)
from tests.helpers.identity_router import identity_router

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
    """The routing with each of its floating-point tensors a leaf of its own."""
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
def test_the_gradient_flows_through_one_field_alone(name: str) -> None:
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
