"""Normalisation of activations."""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

from pydantic import Field
from torch import nn

from moe_ffn.config.base import TaggedConfig

MIN_EPS = 1e-30
"""Smallest epsilon: a smaller one may be 0 in float32, which would turn a zero vector into NaN."""


class NormConfig(TaggedConfig, frozen=True):
    """Normalisation of activations."""

    @abstractmethod
    def build(self, d_model: int) -> nn.Module: ...

    @abstractmethod
    def num_params(self, d_model: int) -> int: ...


class RMSNormConfig(NormConfig, frozen=True):
    """RMSNorm, x / rms(x) * scale (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    type: Literal["rms_norm"] = "rms_norm"
    eps: float = Field(default=1e-6, ge=MIN_EPS)
    """Added to the mean square."""

    def num_params(self, d_model: int) -> int:
        return d_model

    def build(self, d_model: int) -> nn.Module:
        return nn.RMSNorm(d_model, eps=self.eps)


class LayerNormConfig(NormConfig, frozen=True):
    """LayerNorm, with a learned scale and shift (Ba et al. 2016, arXiv:1607.06450)."""

    type: Literal["layer_norm"] = "layer_norm"
    eps: float = Field(default=1e-5, ge=MIN_EPS)
    """Added to the variance."""

    def num_params(self, d_model: int) -> int:
        return 2 * d_model

    def build(self, d_model: int) -> nn.Module:
        return nn.LayerNorm(d_model, eps=self.eps)
