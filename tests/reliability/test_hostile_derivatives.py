"""A derivative that torch is asked for in any way is right, or refused by the name of the backend."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.hostile_blocks import build_on, tokens

BY_TORCH = ("grad", "vjp", "jvp", "forward_ad")
OWN_BACKWARD = "has a backward pass of its own, .* set experts.backend to 'loop', which they do$"
REFUSED_KINDS = {
    "auto": {"batched": OWN_BACKWARD},  # which is not to be foreseen in the forward pass
    "cpu": dict.fromkeys((*BY_TORCH, "batched"), OWN_BACKWARD),
    "triton": dict.fromkeys(BY_TORCH, OWN_BACKWARD),
    "grouped_mm": dict.fromkeys(("jvp", "forward_ad"), "forward AD with _grouped_mm"),
}


def derivative_of(kind: str, block: nn.Module, x: Tensor) -> Tensor:
    def f(x: Tensor) -> Tensor:
        return block(x).hidden

    direction = tokens(seed=5)
    if kind == "grad":
        return torch.func.grad(lambda x: (f(x) * direction).sum())(x)
    if kind == "vjp":
        return torch.func.vjp(f, x)[1](direction)[0]
    if kind == "jvp":
        return torch.func.jvp(f, (x,), (direction,))[1]
    if kind == "forward_ad":
        with torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, direction)
            tangent = torch.autograd.forward_ad.unpack_dual(f(dual)).tangent
            assert tangent is not None
            return tangent
    x = x.detach().requires_grad_()
    rows = torch.stack([direction, 2 * direction])
    return torch.autograd.grad(f(x), x, rows, is_grads_batched=True)[0][1] / 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["grad", "vjp", "jvp", "forward_ad", "batched"])
@pytest.mark.parametrize("backend", ["auto", "cpu", "grouped_mm", "loop", "triton"])
@pytest.mark.filterwarnings("ignore:There is a performance drop", "ignore:.*torch.jit.script")
def test_a_derivative_of_any_kind_is_right_or_refused(backend: str, kind: str) -> None:
    block, x = build_on(backend), tokens()
    wanted = torch.autograd.functional.jacobian(lambda x: build_on("loop")(x).hidden, x)
    assert isinstance(wanted, Tensor)
    axes = ([3, 4, 5], [0, 1, 2]) if kind in ("jvp", "forward_ad") else ([0, 1, 2], [0, 1, 2])
    wanted = torch.tensordot(wanted, tokens(seed=5), dims=axes)  # pyright: ignore[reportArgumentType]
    if refusal := REFUSED_KINDS.get(backend, {}).get(kind):
        with pytest.raises((ValueError, RuntimeError), match=refusal):
            derivative_of(kind, block, x)
        return
    torch.testing.assert_close(derivative_of(kind, block, x), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("backend", ["auto", "cpu", "grouped_mm", "loop", "triton"])
@pytest.mark.filterwarnings("ignore:torch.searchsorted")
def test_vmap_is_refused_for_a_leading_axis(backend: str) -> None:
    block, x = build_on(backend), tokens(3, 2, 6)
    with pytest.raises(ValueError, match=r"^torch.func.vmap does not go .* one more leading axis"):
        torch.func.vmap(lambda x: block(x).hidden)(x)
    apart = torch.stack([block(part).hidden for part in x])
    torch.testing.assert_close(block(x).hidden, apart)
