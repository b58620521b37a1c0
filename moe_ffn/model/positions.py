"""Position encodings: vectors that are added to embeddings, or a rotation of queries and keys.

B batch, H heads, S sequence, D model width, d head width
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from einops import rearrange, repeat
from pydantic import Field
from torch import Tensor, nn

from moe_ffn.config.base import TaggedConfig
from moe_ffn.config.errors import Unsupported, UseCase


class PositionsConfig(TaggedConfig, frozen=True):
    """The position encoding."""

    supports_cache: ClassVar[bool] = False
    """True if the module defines `Positions.at`."""

    @abstractmethod
    def build(self, d_model: int, head_dim: int, max_seq_len: int) -> Positions: ...

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        """Return why decoding with a cache is unsupported; None if it is supported."""
        if self.supports_cache or not use_case.cached:
            return None
        return Unsupported(
            f"type '{self.type}' cannot encode a single position, which decoding with a cache needs",
            "define Positions.at and set supports_cache = True",
        )

    def num_params(self, d_model: int, max_seq_len: int) -> int:
        return 0

    def check_widths(self, d_model: int, head_dim: int) -> None:
        """Raise ValueError if the encoding does not support the widths of a model."""


class RotaryConfig(PositionsConfig, frozen=True):
    """Rotary embeddings of queries and keys (Su et al. 2021, RoFormer, arXiv:2104.09864)."""

    type: Literal["rope"] = "rope"
    supports_cache: ClassVar[bool] = True
    base: float = Field(default=10_000.0, gt=1)
    """Base of the wavelengths, of which the longest is about 2 pi * base positions."""

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
    supports_cache: ClassVar[bool] = True

    def check_widths(self, d_model: int, head_dim: int) -> None:
        if d_model % 2:
            raise ValueError(f"positions.type 'sinusoidal' needs an even d_model, got {d_model}")

    def build(self, d_model: int, head_dim: int, max_seq_len: int) -> Positions:
        return Sinusoidal(d_model, max_seq_len)


class LearnedConfig(PositionsConfig, frozen=True):
    """One learned vector per position, added to the embeddings."""

    type: Literal["learned"] = "learned"
    supports_cache: ClassVar[bool] = True

    def num_params(self, d_model: int, max_seq_len: int) -> int:
        return max_seq_len * d_model

    def build(self, d_model: int, head_dim: int, max_seq_len: int) -> Positions:
        return Learned(d_model, max_seq_len)


class PositionEncoding:
    """Encoding of the positions of a sequence; a subclass overrides `embed` or `rotate`."""

    def embed(self, x_BSD: Tensor) -> Tensor:
        """Add position vectors to token embeddings."""
        return x_BSD

    def rotate(self, x_BHSd: Tensor) -> Tensor:
        """Rotate queries or keys by their positions."""
        return x_BHSd


class Positions(PositionEncoding, nn.Module):
    """Encoding of tokens at positions 0, 1, 2 and so on."""

    def at(self, positions: slice | Tensor) -> PositionEncoding:
        """Return the encoding at a slice of positions, or at the positions of each row, int64 (B, S)."""
        return self


@dataclass(frozen=True)
class AddedEncoding(PositionEncoding):
    """Position vectors that are added to embeddings."""

    table: Tensor
    """Position vectors, (S, D) or (B, S, D)."""

    def embed(self, x_BSD: Tensor) -> Tensor:
        return x_BSD + self.table


@dataclass(frozen=True)
class RotaryEncoding(PositionEncoding):
    """A rotation of queries and keys."""

    cos: Tensor
    """Cosines, (S, d) or (B, 1, S, d)."""
    sin: Tensor

    def rotate(self, x_BHSd: Tensor) -> Tensor:
        first, second = x_BHSd.chunk(2, dim=-1)
        rotated = torch.cat([-second, first], dim=-1)
        return (x_BHSd * self.cos + rotated * self.sin).to(x_BHSd.dtype)


class Rotary(Positions):
    """Rotates each pair (i, i + d/2) of a head by the angle position * base^(-2i/d), like Llama."""

    cos: Tensor
    sin: Tensor

    def __init__(self, base: float, head_dim: int, max_seq_len: int) -> None:
        super().__init__()
        frequencies = base ** (-torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim)
        angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float64), frequencies)
        angles = repeat(angles, "s half -> s (two half)", two=2).float()
        # Not stored in checkpoints, since the config determines them.
        self.register_buffer("cos", angles.cos(), persistent=False)
        self.register_buffer("sin", angles.sin(), persistent=False)

    def rotate(self, x_BHSd: Tensor) -> Tensor:
        return self.at(slice(x_BHSd.shape[-2])).rotate(x_BHSd)

    def at(self, positions: slice | Tensor) -> PositionEncoding:
        cos, sin = self.cos[positions], self.sin[positions]
        if isinstance(positions, slice):
            return RotaryEncoding(cos, sin)
        return RotaryEncoding(cos[:, None], sin[:, None])


class Sinusoidal(Positions):
    """Adds PE(p, 2i) = sin(p / 10000^(2i/D)) and PE(p, 2i+1) = cos(p / 10000^(2i/D))."""

    table_SD: Tensor

    def __init__(self, d_model: int, max_seq_len: int) -> None:
        super().__init__()
        frequencies = 10_000 ** (-torch.arange(0, d_model, 2, dtype=torch.float64) / d_model)
        angles = torch.outer(torch.arange(max_seq_len, dtype=torch.float64), frequencies)
        table_SD = rearrange([angles.sin(), angles.cos()], "two s half -> s (half two)").float()
        self.register_buffer("table_SD", table_SD, persistent=False)

    def embed(self, x_BSD: Tensor) -> Tensor:
        return self.at(slice(x_BSD.shape[-2])).embed(x_BSD)

    def at(self, positions: slice | Tensor) -> PositionEncoding:
        return AddedEncoding(self.table_SD[positions])


class Learned(Positions):
    """Adds one learned vector per position."""

    def __init__(self, d_model: int, max_seq_len: int) -> None:
        super().__init__()
        self.table = nn.Embedding(max_seq_len, d_model)
        nn.init.normal_(self.table.weight, std=0.02)

    def embed(self, x_BSD: Tensor) -> Tensor:
        return self.at(slice(x_BSD.shape[-2])).embed(x_BSD)

    def at(self, positions: slice | Tensor) -> PositionEncoding:
        return AddedEncoding(self.table.weight[positions])
