"""Position encodings: vectors that are added to embeddings, or a rotation of queries and keys.

B batch, H heads, S sequence, D model width, d head width, F frequencies
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

import torch
from einops import rearrange, repeat
from pydantic import Field, model_validator
from torch import Tensor, nn

from moe_ffn.config.base import MAX_COUNT, TaggedConfig
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

    def for_length(self, max_seq_len: int) -> PositionsConfig:
        """Return this config with values for options that depend on the length of sequences."""
        return self

    def check_widths(self, d_model: int, head_dim: int) -> None:
        """Raise ValueError if the encoding does not support the widths of a model."""


class RotaryScalingConfig(TaggedConfig, frozen=True):
    """Lower frequencies of rotary positions, for longer sequences than in an earlier training."""

    factor: float = Field(ge=1)
    """Maximum sequence length divided by that of the earlier training."""

    @property
    def magnitude(self) -> float:
        """Return the factor of cosines and sines."""
        return 1.0

    @property
    def score_factor(self) -> float:
        """Return the factor of attention scores."""
        return 1.0

    @abstractmethod
    def kept(self, frequencies_F: Tensor, base: float) -> Tensor | float:
        """Return the share of each frequency, 0 to 1, that is not divided by `factor`."""

    def scale(self, frequencies_F: Tensor, base: float) -> Tensor:
        """Return the scaled frequencies; `base` is the base of the wavelengths, such as 10,000."""
        kept_F = self.kept(frequencies_F, base)
        return frequencies_F * (kept_F + (1 - kept_F) / self.factor)


class OriginalLengthConfig(RotaryScalingConfig, frozen=True):
    """Scaling that depends on the length of the earlier training."""

    original_seq_len: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Number of tokens of the longest sequence of the earlier training; null: the longest sequence of this
    model divided by `factor`."""

    def original(self) -> int:
        """Return `original_seq_len`, which `RotaryConfig.for_length` has set."""
        assert self.original_seq_len is not None
        return self.original_seq_len


class LinearScalingConfig(RotaryScalingConfig, frozen=True):
    """All frequencies are divided by `factor` (position interpolation, arXiv:2306.15595)."""

    type: Literal["linear"] = "linear"

    def kept(self, frequencies_F: Tensor, base: float) -> Tensor | float:
        return 0.0


class Llama3ScalingConfig(OriginalLengthConfig, frozen=True):
    """Low frequencies are divided by `factor`, high ones are kept, as in Llama 3.1 (arXiv:2407.21783).

    The formula is `apply_scaling` of github.com/meta-llama/llama-models.
    """

    type: Literal["llama3"] = "llama3"
    low_freq_factor: float = Field(default=1.0, gt=0)
    """Frequencies with at most this many turns in `original_seq_len` tokens are divided by `factor`."""
    high_freq_factor: float = Field(default=4.0, gt=0)
    """Frequencies with at least this many turns are kept; frequencies in between are divided by less."""

    @model_validator(mode="after")
    def _check_order(self) -> Llama3ScalingConfig:
        if self.low_freq_factor >= self.high_freq_factor:
            raise ValueError(
                f"low_freq_factor ({self.low_freq_factor:g}) must be less than high_freq_factor "
                f"({self.high_freq_factor:g})"
            )
        return self

    def kept(self, frequencies_F: Tensor, base: float) -> Tensor:
        turns_F = self.original() * frequencies_F / (2 * math.pi)
        low, high = self.low_freq_factor, self.high_freq_factor
        return ((turns_F - low) / (high - low)).clamp(0, 1)


class YarnConfig(OriginalLengthConfig, frozen=True):
    """Low frequencies are divided by `factor`, high ones are kept, as in YaRN (arXiv:2309.00071).

    Sections 3.2 and 3.4 hold the formulas; attention also becomes sharper.
    """

    type: Literal["yarn"] = "yarn"
    beta_fast: float = Field(default=32.0, gt=0)
    """Frequencies with at least this many turns in `original_seq_len` tokens are kept."""
    beta_slow: float = Field(default=1.0, gt=0)
    """Frequencies with at most this many turns are divided by `factor`; frequencies in between by
    less."""
    truncate: bool = True
    """Round the two boundaries outwards to whole frequencies."""
    attention_factor: float | None = Field(default=None, gt=0)
    """Factor of cosines and sines; 1 + 0.1 ln(factor) by default."""
    score_mscale: float = Field(default=0.0, ge=0)
    """Coefficient m of DeepSeek-V3 (`mscale_all_dim`): scores are multiplied by (1 + 0.1 m ln(factor))^2."""

    @property
    def magnitude(self) -> float:
        return yarn_mscale(self.factor) if self.attention_factor is None else self.attention_factor

    @property
    def score_factor(self) -> float:
        return yarn_mscale(self.factor, self.score_mscale) ** 2

    def kept(self, frequencies_F: Tensor, base: float) -> Tensor:
        num_frequencies = len(frequencies_F)

        def index(turns: float) -> float:
            """Return the index of the frequency with this many turns."""
            return num_frequencies * math.log(self.original() / (2 * math.pi * turns), base)

        low, high = index(self.beta_fast), index(self.beta_slow)
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, 2 * num_frequencies - 1)
        indices_F = torch.arange(num_frequencies, dtype=frequencies_F.dtype)
        return 1 - ((indices_F - low) / (high - low or 0.001)).clamp(0, 1)


def yarn_mscale(factor: float, coefficient: float = 1.0) -> float:
    """Return 1 + 0.1 m ln(factor), YaRN's equation 22 for m = 1."""
    return 1 + 0.1 * coefficient * math.log(factor)


class RotaryConfig(PositionsConfig, frozen=True):
    """Rotary embeddings of queries and keys (Su et al. 2021, RoFormer, arXiv:2104.09864)."""

    type: Literal["rope"] = "rope"
    supports_cache: ClassVar[bool] = True
    base: float = Field(default=10_000.0, gt=1)
    """Base of the wavelengths, of which the longest is about 2 pi * base positions."""
    fraction: float = Field(default=1.0, gt=0, le=1)
    """Fraction of each head that is rotated, such as 0.5 in GLM-4.5; the rest has no positions."""
    scaling: RotaryScalingConfig | None = None
    """Lower frequencies for longer sequences, such as `{type: yarn, factor: 4}`; null: none."""

    def check_widths(self, d_model: int, head_dim: int) -> None:
        if self.fraction < 1 and (width := self.rotated_width(head_dim)) % 2 + (width == 0):
            raise ValueError(
                f"positions.fraction ({self.fraction:g}) of a head of width {head_dim} must be an even "
                f"number of units, got {width}"
            )
        if self.fraction == 1 and head_dim % 2:
            raise ValueError(
                f"positions.type 'rope' needs an even head width, got {head_dim} (attention.head_dim, by "
                f"default d_model ({d_model}) / num_heads, or attention.latent.rotated_dim)"
            )

    def build(self, d_model: int, head_dim: int, max_seq_len: int) -> Positions:
        return Rotary(self.for_length(max_seq_len), head_dim, max_seq_len)

    def for_length(self, max_seq_len: int) -> RotaryConfig:
        scaling = self.scaling
        if not isinstance(scaling, OriginalLengthConfig) or scaling.original_seq_len is not None:
            return self
        original = max(round(max_seq_len / scaling.factor), 1)
        scaling = scaling.model_copy(update={"original_seq_len": original})
        return self.model_copy(update={"scaling": scaling})

    def rotated_width(self, head_dim: int) -> int:
        return int(head_dim * self.fraction)

    def frequencies(self, head_dim: int) -> Tensor:
        """Return the angle by which each pair of units turns per position, without `scaling`."""
        width = self.rotated_width(head_dim)
        return self.base ** (-torch.arange(0, width, 2, dtype=torch.float64) / width)


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

    score_factor: float = 1.0
    """Factor of attention scores."""

    def embed(self, x_BSD: Tensor) -> Tensor:
        """Add position vectors to token embeddings."""
        return x_BSD

    def rotate(self, x_BHSd: Tensor) -> Tensor:
        """Rotate queries or keys by their positions."""
        return x_BHSd


class Positions(PositionEncoding, nn.Module):
    """Encoding of tokens at positions 0, 1, 2 and so on."""

    def tables(self) -> dict[str, Tensor]:
        """Compute the buffers that the config determines, in float32; no checkpoint stores them."""
        return {}

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        # A table that was bfloat16 and becomes float32 would stay as coarse as it was.
        for name, table in self.tables().items():
            setattr(self, name, table.to(getattr(self, name)))
        return self

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
    """Cosines of the rotated units, (S, r) or (B, 1, S, r) with r at most d."""
    sin: Tensor
    score_factor: float = 1.0

    def rotate(self, x_BHSd: Tensor) -> Tensor:
        x, rest = x_BHSd.tensor_split([self.cos.shape[-1]], dim=-1)
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat([-second, first], dim=-1)
        rotated = (x * self.cos + rotated * self.sin).to(x.dtype)
        return torch.cat([rotated, rest], dim=-1) if rest.shape[-1] else rotated


class Rotary(Positions):
    """Rotates units i and i + r/2 of a head's first r by the angle position * base^(-2i/r), like Llama."""

    cos: Tensor
    sin: Tensor

    def __init__(self, config: RotaryConfig, head_dim: int, max_seq_len: int) -> None:
        super().__init__()
        self.config, self.head_dim, self.max_seq_len = config, head_dim, max_seq_len
        if config.scaling is not None:
            self.score_factor = config.scaling.score_factor
        for name, table in self.tables().items():
            self.register_buffer(name, table, persistent=False)

    def tables(self) -> dict[str, Tensor]:
        frequencies_F, magnitude = self.config.frequencies(self.head_dim), 1.0
        if (scaling := self.config.scaling) is not None:
            frequencies_F = scaling.scale(frequencies_F, self.config.base)
            magnitude = scaling.magnitude
        angles = torch.outer(torch.arange(self.max_seq_len, dtype=torch.float64), frequencies_F)
        angles = repeat(angles, "s half -> s (two half)", two=2).float()
        return {"cos": angles.cos() * magnitude, "sin": angles.sin() * magnitude}

    def rotate(self, x_BHSd: Tensor) -> Tensor:
        return self.at(slice(x_BHSd.shape[-2])).rotate(x_BHSd)

    def at(self, positions: slice | Tensor) -> PositionEncoding:
        cos, sin = self.cos[positions], self.sin[positions]
        if isinstance(positions, slice):
            return RotaryEncoding(cos, sin, self.score_factor)
        return RotaryEncoding(cos[:, None], sin[:, None], self.score_factor)


class Sinusoidal(Positions):
    """Adds PE(p, 2i) = sin(p / 10000^(2i/D)) and PE(p, 2i+1) = cos(p / 10000^(2i/D))."""

    table_SD: Tensor

    def __init__(self, d_model: int, max_seq_len: int) -> None:
        super().__init__()
        self.d_model, self.max_seq_len = d_model, max_seq_len
        self.register_buffer("table_SD", self.tables()["table_SD"], persistent=False)

    def tables(self) -> dict[str, Tensor]:
        exponents = -torch.arange(0, self.d_model, 2, dtype=torch.float64) / self.d_model
        angles = torch.outer(torch.arange(self.max_seq_len, dtype=torch.float64), 10_000**exponents)
        table_SD = rearrange([angles.sin(), angles.cos()], "two s half -> s (half two)").float()
        return {"table_SD": table_SD}

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
