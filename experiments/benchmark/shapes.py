"""The size of a layer to time, and how it is typed: `T,D,F,E,K,dtype`."""

from __future__ import annotations

from dataclasses import dataclass

from moe_ffn.cli.memory import gigabytes, memory_limit
from moe_ffn.cli.parser import MAX_COUNT, whole_number
from moe_ffn.errors import ConfigError, did_you_mean

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""As typed -> torch's name."""

SEQUENCE = 256
"""Tokens are cut into sequences of this length where it divides them: some libraries work by sequence."""


@dataclass(frozen=True)
class Shape:
    """A layer of gated experts and the tokens it is given."""

    num_tokens: int
    """T"""
    d_model: int
    """D"""
    d_ff: int
    """F, hidden width of one expert."""
    num_experts: int
    """E"""
    k: int
    """Experts per token."""
    dtype: str
    """A key of `DTYPES`."""

    @property
    def active_width(self) -> int:
        """Hidden width that a token passes through: that of the dense block beside it."""
        return self.k * self.d_ff

    @property
    def flops(self) -> int:
        """Of the experts' products, forward and backward: three matrices, three products each."""
        return 3 * 3 * 2 * self.num_tokens * self.d_model * self.active_width

    @property
    def num_bytes(self) -> int:
        """Of the experts' weights, the input and the hidden values: far less than a step needs."""
        size = 4 if self.dtype == "fp32" else 2
        weights = 3 * self.num_experts * self.d_model * self.d_ff
        return size * (weights + self.num_tokens * (self.d_model + self.active_width))

    @property
    def batch(self) -> tuple[int, int, int]:
        """(B, S, D) of the input."""
        length = SEQUENCE if self.num_tokens % SEQUENCE == 0 else self.num_tokens
        return self.num_tokens // length, length, self.d_model

    def __str__(self) -> str:
        return (
            f"T {self.num_tokens}, D {self.d_model}, F {self.d_ff}, E {self.num_experts}, "
            f"K {self.k}, {self.dtype}"
        )


def parse_shape(text: str) -> Shape:
    """`2048,512,512,8,2,fp32` as a Shape.

    Raises:
        ConfigError: one sentence that begins with `--shape`.
    """
    where = f"--shape {text}"
    parts = [part.strip() for part in text.split(",")]
    if len(parts) != 6:
        raise ConfigError(
            f"{where}: has {len(parts)} parts but needs 6, T,D,F,E,K,dtype, "
            "as in --shape 2048,512,512,8,2,fp32"
        )
    sizes: list[int] = []
    for name, number in zip("TDFEK", parts[:5], strict=True):
        size = whole_number(number, least=1)
        if size is None:
            raise ConfigError(
                f"{where}: {name} must be a whole number from 1 to {MAX_COUNT}, got '{number}'"
            )
        sizes.append(size)
    shape = Shape(*sizes, dtype=parts[5])
    if shape.dtype not in DTYPES:
        hint = did_you_mean(shape.dtype, DTYPES)
        raise ConfigError(f"{where}: dtype '{shape.dtype}' is not one of {', '.join(DTYPES)}{hint}")
    if shape.k > shape.num_experts:
        raise ConfigError(
            f"{where}: K ({shape.k}) must not exceed E ({shape.num_experts}); lower K or raise E"
        )
    limit = memory_limit()
    if limit is not None and shape.num_bytes > limit:
        raise ConfigError(
            f"{where}: takes {gigabytes(shape.num_bytes)}, and this process may have {gigabytes(limit)} of "
            "memory; lower T, D, F or E"
        )
    return shape
