"""Activations and gates: their functions, names and options."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from moe_ffn.config.base import MAX_COUNT, Config

Activation = Literal["relu", "gelu", "gelu_tanh", "silu", "relu_squared", "sigmoid", "identity"]
"""`relu_squared` is relu(x)^2 (So et al. 2021, Primer); `gelu` is exact, `gelu_tanh` its approximation in
GPT-2 (Hendrycks and Gimpel 2016, arXiv:1606.08415, section 2)."""

GatedType = Literal["swiglu", "geglu", "geglu_tanh", "reglu", "glu", "bilinear"]

GATE_ACTIVATIONS: dict[GatedType, Activation] = {
    "swiglu": "silu",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
    "glu": "sigmoid",
    "bilinear": "identity",
}
"""The variants of Shazeer 2020, "GLU Variants Improve Transformer" (arXiv:2002.05202)."""

assert set(GATE_ACTIVATIONS) == set(get_args(GatedType))


def relu_squared(x: Tensor) -> Tensor:
    return x.relu().square()


def gelu_tanh(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


def identity(x: Tensor) -> Tensor:
    return x


ACTIVATIONS: dict[Activation, Callable[[Tensor], Tensor]] = {
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": gelu_tanh,
    "silu": F.silu,
    "relu_squared": relu_squared,  # not a lambda, which cannot be pickled
    "sigmoid": torch.sigmoid,
    "identity": identity,
}


@dataclass(frozen=True)
class ClampedSwiGLU:
    """GPT-OSS's gate: (min(max(up, -limit), limit) + 1) * g * sigmoid(alpha * g), g = min(gate, limit)."""

    alpha: float
    limit: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        gate = gate.clamp(max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return (up + 1) * gate * (self.alpha * gate).sigmoid()


@dataclass(frozen=True)
class ClampedGate:
    """`ClampedSwiGLU` that adds another number than 1, or clamps the gate after its activation.

    (min(max(up, -limit), limit) + added) * h, where h = g * sigmoid(alpha * g), g = min(gate, limit), or,
    with `after`, h = min(gate * sigmoid(alpha * gate), limit). With `added` 0 and alpha 1, the first is the
    gate of `deepseek_v4` in transformers, the second the gate of `step3p7`.
    """

    alpha: float
    limit: float
    added: float
    after: bool

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        if not self.after:
            gate = gate.clamp(max=self.limit)
        # F.silu saves one tensor for backward; a product of two factors saves two.
        hidden = F.silu(gate) if self.alpha == 1 else gate * (self.alpha * gate).sigmoid()
        if self.after:
            hidden = hidden.clamp(max=self.limit)
        up = up.clamp(min=-self.limit, max=self.limit)
        return (up + self.added if self.added else up) * hidden


@dataclass(frozen=True)
class SoftCappedSwiGLU:
    """cap(gate, gate_cap) * sigmoid(gate) * cap(up, up_cap) with cap(x, c) = c * tanh(x / c).

    The gate of `inkling2` in transformers.
    """

    gate_cap: float
    up_cap: float

    def __call__(self, gate: Tensor, up: Tensor) -> Tensor:
        return soft_cap(gate, self.gate_cap) * gate.sigmoid() * soft_cap(up, self.up_cap)


def soft_cap(x: Tensor, cap: float) -> Tensor:
    """Return cap * tanh(x / cap), which is within (-cap, cap), and nearly x for small x."""
    return cap * (x / cap).tanh()


GateFunction = ClampedSwiGLU | ClampedGate | SoftCappedSwiGLU
"""Function of gate and up that replaces act(gate) * up."""


class GateOptions(Config, frozen=True):
    """Gate of experts and dense blocks with three matrices: act(gate) * up, or a function of gate and up."""

    @property
    def gate_activation(self) -> Activation:
        return "silu"

    @property
    def gate_function(self) -> GateFunction | None:
        """Function of gate and up that replaces act(gate) * up, if any."""
        return None


class GLUOptions(GateOptions, frozen=True):
    """Type of a gated linear unit, which names the activation of its gate."""

    type: GatedType = "swiglu"

    @property
    def gate_activation(self) -> Activation:
        return GATE_ACTIVATIONS[self.type]


class ClampOptions(GateOptions, frozen=True):
    """Options of SwiGLU with clamps, in experts and in dense blocks.

    The defaults are GPT-OSS's (arXiv:2508.10925).
    """

    type: Literal["clamped_swiglu"] = "clamped_swiglu"
    alpha: float = Field(default=1.702, gt=0, le=MAX_COUNT)
    """Slope inside the sigmoid; 1 makes it SiLU."""
    limit: float = Field(default=7.0, gt=0, le=MAX_COUNT)
    """Upper bound of the gate, and bound of the linear part on both sides."""
    added: float = Field(default=1.0, ge=-MAX_COUNT, le=MAX_COUNT)
    """Number added to the clamped linear part; 0 in DeepSeek-V4."""
    clamp: Literal["before", "after"] = "before"
    """Clamp the gate before or after its activation."""

    @property
    def gate_function(self) -> GateFunction:
        if (self.added, self.clamp) == (1, "before"):
            return ClampedSwiGLU(self.alpha, self.limit)
        return ClampedGate(self.alpha, self.limit, self.added, self.clamp == "after")


class SoftCapOptions(GateOptions, frozen=True):
    """Options of SwiGLU with soft caps, in experts and in dense blocks."""

    type: Literal["soft_capped_swiglu"] = "soft_capped_swiglu"
    gate_cap: float = Field(default=7.0, gt=0, le=MAX_COUNT)
    """Bound of the gate on both sides; the input of its sigmoid is not bounded."""
    up_cap: float = Field(default=7.0, gt=0, le=MAX_COUNT)
    """Bound of the linear part on both sides."""

    @property
    def gate_function(self) -> GateFunction:
        return SoftCappedSwiGLU(self.gate_cap, self.up_cap)
