"""The derivatives of a whole MoE layer, router included, against finite differences; and second ones.

T tokens, D model width
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradgradcheck
from torch.func import functional_call, grad, hessian, jvp, vmap

from moe_ffn import TokenContext
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.kernels.select import BACKENDS
from moe_ffn.routing.base import RouterLinear
from tests.helpers.every_router import build_layer, every_router, make_batch


@every_router
def test_gradients_of_gradients_of_a_layer_are_those_of_finite_differences(
    router: dict[str, Any],
) -> None:
    """Training mode, except for `sparse_mixer`, whose gradient in training is not that of its output."""
    layer = build_layer(router, backend="loop").double()
    layer.train(router["type"] != "sparse_mixer")
    batch = make_batch(batch=1, length=3)
    names = [name for name, _ in layer.named_parameters()]

    def hidden(x_BSD: Tensor, *parameters: Tensor) -> Tensor:
        torch.manual_seed(0)  # the same noise
        values = dict(zip(names, parameters, strict=True))
        return functional_call(layer, values, (x_BSD, batch.context)).hidden

    inputs = (batch.x_BSD.double().requires_grad_(), *layer.parameters())
    assert gradgradcheck(hidden, inputs, fast_mode=True)


# --------------------------------------------------------------------- every backend, one by one

LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    # Of a linear one, the gradient that reaches the layer is a constant, and the second derivative
    # is not 0 all the same.
    "linear": lambda y: y.sum(),
    "quadratic": lambda y: y.square().sum(),
}


def second_derivatives(layer: MoEFFN, x: Tensor, mask: Tensor, loss: str) -> list[Tensor]:
    """d/d(everything) of the squared gradient of a loss, as a gradient penalty has it."""
    x = x.detach().requires_grad_()
    hidden = layer(x, TokenContext(mask)).hidden
    (gradient,) = torch.autograd.grad(LOSSES[loss](hidden), x, create_graph=True)
    return list(torch.autograd.grad(gradient.square().sum(), [x, *layer.parameters()]))


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_second_derivative_is_right_or_refused(
    backend: str, loss: str, build_moe: Any, tokens_and_mask: Any, dtype_of: Any
) -> None:
    options = {"experts": {"bias": True}, "capacity": {"factor": 1.0}}
    layer = build_moe(backend, **options)
    x, mask = tokens_and_mask(dtype_of(backend), padded=True)
    if backend in ("cpu", "triton"):
        message = rf"experts\.backend '{backend}' has no second derivative.*set experts\.backend to 'loop'"
        with pytest.raises(RuntimeError, match=message):
            second_derivatives(layer, x, mask, loss)
        return
    reference = build_moe("loop", **options).double()
    wanted = second_derivatives(reference, x.double(), mask, loss)
    tolerance = 1e-12 if x.dtype == torch.float64 else 1e-4  # of sums of squares of sums
    for one, other in zip(second_derivatives(layer, x, mask, loss), wanted, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)


def test_a_second_derivative_through_a_bfloat16_router_is_right(
    build_moe: Any, tokens_and_mask: Any
) -> None:
    layer = build_moe("loop").bfloat16()
    x, mask = tokens_and_mask(torch.bfloat16, padded=True)
    got = second_derivatives(layer, x, mask, "quadratic")
    wanted = second_derivatives(layer.double(), x.double(), mask, "quadratic")
    for one, other in zip(got, wanted, strict=True):
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error < 5e-2  # 8 bits, rounded some ten times


def gradient(function: Callable[..., Tensor], x: Tensor, w: Tensor) -> object:
    return grad(function, argnums=(0, 1))(x, w)


def gradient_per_sequence(function: Callable[..., Tensor], x: Tensor, w: Tensor) -> object:
    return vmap(grad(function), in_dims=(0, None))(torch.stack([x, 2 * x]), w)


def directional_derivative(function: Callable[..., Tensor], x: Tensor, w: Tensor) -> object:
    return jvp(function, (x, w), (torch.ones_like(x), torch.ones_like(w)))


def second_gradient(function: Callable[..., Tensor], x: Tensor, w: Tensor) -> object:
    return hessian(function)(x, w)


# torch's own jvp loads rules that are written with it.
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize(
    "transform", [gradient, gradient_per_sequence, directional_derivative, second_gradient]
)
def test_transforms_of_torch_func_go_through_a_router_of_bfloat16_tokens(
    transform: Callable[..., Any],
) -> None:
    torch.manual_seed(0)
    projection = RouterLinear(d_model=6, num_experts=4, bias=True)
    x_TD, weight_ED = torch.randn(5, 6).bfloat16(), torch.randn(4, 6)

    def ours(x: Tensor, w: Tensor) -> Tensor:
        values = {"weight": w, "bias": w[:, 0]}
        return functional_call(projection, values, (x,)).sin().sum()

    def plain(x: Tensor, w: Tensor) -> Tensor:
        return torch.nn.functional.linear(x.float(), w, w[:, 0]).sin().sum()

    got, wanted = (transform(function, x_TD, weight_ED) for function in (ours, plain))
    torch.testing.assert_close(got, wanted)
