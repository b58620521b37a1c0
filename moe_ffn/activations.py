"""Activation functions by name, and which of them each gated variant uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

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
