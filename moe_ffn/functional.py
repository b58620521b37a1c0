"""Activation functions by name, and whether a transform of `torch.func` is at work."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad

Activation = Literal["relu", "gelu", "silu", "relu_squared", "sigmoid", "identity"]
"""`relu_squared` is relu(x)^2 (So et al. 2021, Primer); `gelu` is the exact one, not tanh."""

GatedType = Literal["swiglu", "geglu", "reglu", "glu", "bilinear"]

GATE_ACTIVATIONS: dict[GatedType, Activation] = {
    "swiglu": "silu",
    "geglu": "gelu",
    "reglu": "relu",
    "glu": "sigmoid",
    "bilinear": "identity",
}
"""The variants of Shazeer 2020, "GLU Variants Improve Transformer" (arXiv:2002.05202)."""

assert set(GATE_ACTIVATIONS) == set(get_args(GatedType))


def relu_squared(x: Tensor) -> Tensor:
    return x.relu().square()


def identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "silu": F.silu,
    "relu_squared": relu_squared,  # no lambda: a block that holds one could not be pickled
    "sigmoid": torch.sigmoid,
    "identity": identity,
}


def activation_function(name: Activation) -> Callable[[Tensor], Tensor]:
    """The element-wise function called `name`; KeyError when there is none."""
    return ACTIVATIONS[name]


@dataclass(frozen=True)
class ClampedSwiGLU:
    """GPT-OSS's gate: (min(max(up, -limit), limit) + 1) * g * sigmoid(alpha * g), g = min(gate, limit)."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * gate * (self.alpha * gate).sigmoid()


# -- transforms of torch.func, which see torch's own operators and no backward pass of ours


def transforms_at_work() -> bool:
    """Whether `grad`, `jvp` or `vmap` of `torch.func`, or forward-mode differentiation, is under way."""
    if torch.compiler.is_compiling():  # which traces through them by itself
        return False
    # Private, and what `torch.autograd.Function.apply` itself asks; there is no public way.
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_batched(tensor: Tensor) -> bool:
    """Whether the tensor has a hidden batch axis, of `vmap` or of a backward pass with `is_grads_batched`."""
    functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009  # typed nowhere
    if functorch.is_legacy_batchedtensor(tensor):
        return True
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False
