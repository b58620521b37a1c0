"""Positions of tokens: added to embeddings, or a rotation of queries and keys.

B batch, H heads, S sequence, D model width, d head width
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Literal

import torch
from einops import rearrange, repeat
from pydantic import Field
from torch import Tensor, nn

from moe_ffn.config import TaggedConfig


class PositionsConfig(TaggedConfig, frozen=True):
    """How positions enter the model."""

    @abstractmethod
    def build(self, d_model: int, head_dim: int, max_seq_len: int) -> Positions: ...

    def num_params(self, d_model: int, max_seq_len: int) -> int:
        return 0

    def check_widths(self, d_model: int, head_dim: int) -> None:
        """ValueError, in one sentence, where these positions do not go with the widths of a model."""


class RotaryConfig(PositionsConfig, frozen=True):
    """Rotary embeddings of queries and keys (Su et al. 2021, RoFormer, arXiv:2104.09864)."""

    type: Literal["rope"] = "rope"
    base: float = Field(default=10_000.0, gt=1)
    """The longest wavelength is about 2 pi * base positions."""

    def check_widths(self, d_model: int, head_dim: int) -> None:
        if head_dim % 2:
            raise ValueError(
                f"positions.type 'rope' needs an even head width, got {head_dim} (attention.head_dim, by "
                f"default d_model ({d_model}) / num_heads, or attention.latent.rotated_dim)"
            )

    def build(self, d_model: int, head_dim: int, max_seq_len: int) -> Positions:
        return Rotary(self.base, head_dim, max_seq_len)


class SinusoidalConfig(PositionsConfig, frozen=True):
    """Fixed sines and cosines, added to the embeddings (Vaswani et al. 2017, section 3.5)."""

    type: Literal["sinusoidal"] = "sinusoidal"

    def check_widths(self, d_model: int, head_dim: int) -> None:
        if d_model % 2:
            raise ValueError(f"positions.type 'sinusoidal' needs an even d_model, got {d_model}")

    def build(self, d_model: int, head_dim: int, max_seq_len: int) -> Positions:
        return Sinusoidal(d_model, max_seq_len)


class LearnedConfig(PositionsConfig, frozen=True):
    """One learned vector per position, added to the embeddings."""

    type: Literal["learned"] = "learned"

    def num_params(self, d_model: int, max_seq_len: int) -> int:
        return max_seq_len * d_model

    def build(self, d_model: int, head_dim: int, max_seq_len: int) -> Positions:
        return Learned(d_model, max_seq_len)


class Positions(nn.Module):
    """Adds positions to embeddings, or to queries and keys; each kind overrides one of the two."""

    def embed(self, x_BSD: Tensor) -> Tensor:
        """Token embeddings with their positions."""
        return x_BSD

    def rotate(self, x_BHSd: Tensor) -> Tensor:
        """Queries or keys with their positions."""
        return x_BHSd


class Rotary(Positions):
    """Turns each pair (i, i + d/2) of a head's units by position * base^(-2i/d), as Llama does."""

    cos: Tensor
    sin: Tensor

    def __init__(self, base: float, head_dim: int, max_seq_len: int) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float64), frequencies)
        angles = repeat(angles, "s half -> s (two half)", two=2).float()
        # Made from the config, so it belongs in no checkpoint.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x_BHSd: Tensor) -> Tensor:
        length = x_BHSd.shape[-2]
        first, second = x_BHSd.chunk(2, dim=-1)
        turned = torch.cat([-second, first], dim=-1)
        rotated = x_BHSd * self.cos[:length] + turned * self.sin[:length]
        return rotated.to(x_BHSd.dtype)


class Sinusoidal(Positions):
    """PE(p, 2i) = sin(p / 10000^(2i/D)), PE(p, 2i+1) = cos of the same."""

    table_SD: Tensor

    def __init__(self, d_model: int, max_seq_len: int) -> None:
        super().__init__()
        frequencies = 10_000 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
        angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float64), frequencies)
        table_SD = rearrange([angles.sin(), angles.cos()], "two s half -> s (half two)").float()
        self.register_buffer("table_SD", table_SD, persistent=False)

    def embed(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + self.table_SD[: x_BSD.shape[-2]]


class Learned(Positions):
    """One trained vector per position."""

    def __init__(self, d_model: int, max_seq_len: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_seq_len, d_model)
        nn.init.normal_(self.table.weight, std=0.02)

    def embed(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + self.table.weight[: x_BSD.shape[-2]]
