"""Norms inside a routed block: of what its parts read and return."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from moe_ffn.config.base import Config


class InnerNormConfig(Config, frozen=True):
    """An RMS norm with a learned scale."""

    eps: float = Field(default=1e-6, gt=0, lt=1)
    """Added to the mean of squares."""
    scale: Literal["after", "before"] = "after"
    """Whether the learned scale multiplies what the norm returns, or what it reads."""


class NormsConfig(Config, frozen=True):
    """RMS norms inside the block, none of them by default; `{}` is one with default options."""

    experts_input: InnerNormConfig | None = None
    """Of what the experts read; the router and the shared expert read the token without it (Gemma 4)."""
    each_expert: InnerNormConfig | None = None
    """Of what each expert returns, before it is weighted; all share one scale (Muse Spark)."""
    routed: InnerNormConfig | None = None
    """Of the routed experts' sum (Gemma 4)."""
    shared_input: InnerNormConfig | None = None
    """Of what the shared expert reads (Gemma 4)."""
    shared: InnerNormConfig | None = None
    """Of what the shared expert returns, before it joins (Gemma 4)."""
    output: InnerNormConfig | None = None
    """Of the output of the whole block (A.X K1)."""

    def widths(self, d_model: int, d_experts: int) -> dict[str, int]:
        """The norms that are asked for, by option, and their widths."""
        inside = ("experts_input", "each_expert")
        return {
            place: d_experts if place in inside else d_model
            for place, norm in self
            if norm is not None
        }

    def num_params(self, d_model: int, d_experts: int) -> int:
        return sum(self.widths(d_model, d_experts).values())


class InnerNorm(nn.RMSNorm):
    """An RMS norm whose output has the dtype of its input."""

    def __init__(self, config: InnerNormConfig, width: int) -> None:
        super().__init__(width, config.eps)
        self.scales_first = config.scale == "before"

    def forward(self, x: Tensor) -> Tensor:
        if not self.scales_first:
            return super().forward(x).to(x.dtype)
        return F.rms_norm(x * self.weight, self.normalized_shape, eps=self.eps).to(x.dtype)


class Norms(nn.Module):
    """The norms of the config, each under the name of its option."""

    def __init__(self, config: NormsConfig, widths: Mapping[str, int]) -> None:
        super().__init__()
        for place, width in widths.items():
            self.add_module(place, InnerNorm(getattr(config, place), width))

    def forward(self, place: str, x: Tensor) -> Tensor:
        """`x`, normalised if the config has a norm for that place."""
        found = self._modules.get(place)
        return x if found is None else found(x)
