"""Size of a layer to time; on the command line `T,D,F,E,K,dtype`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from moe_ffn.cli.parser import MAX_COUNT, whole_number
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.numbers import gigabytes
from moe_ffn.config.process_memory import memory_limit

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""Name on the command line -> name in torch."""

SEQUENCE = 256
"""Tokens per sequence, if it divides the number of tokens; some libraries need several sequences."""


@dataclass(frozen=True)
class Shape:
    """Size of a layer of gated experts and of its input."""

    num_tokens: int
    """T"""
    d_model: int
    """D"""
    d_ff: int
    """F, the hidden width of an expert."""
    num_experts: int
    """E"""
    k: int
    """Experts per token."""
    dtype: str
    """A key of `DTYPES`."""

    @property
    def active_width(self) -> int:
        """Hidden width that a token uses, which is also the width of the dense block."""
        return self.k * self.d_ff

    @property
    def flops(self) -> int:
        """FLOPs of the experts, forward and backward: three products for each of three matrices."""
        return 3 * 3 * 2 * self.num_tokens * self.d_model * self.active_width

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


FEW_TOKENS = "Qwen3 30B-A3B, few tokens"

MODELS = {
    "OLMoE 1B-7B": Shape(32768, 2048, 1024, 64, 8, "bf16"),
    "Qwen3 30B-A3B": Shape(32768, 2048, 768, 128, 8, "bf16"),
    FEW_TOKENS: Shape(8192, 2048, 768, 128, 8, "bf16"),
    "Mixtral 8x7B": Shape(16384, 4096, 14336, 8, 2, "bf16"),
}
"""Layers of published models -> their sizes, with the tokens of a training step on one GPU."""


class KernelCost(NamedTuple):
    """Least work of one Triton kernel in a training step."""

    kernel: str
    flops: int
    num_bytes: int
    """Bytes of GPU memory, if every operand is read or written once."""

    def seconds(self, flops_per_second: float, bytes_per_second: float) -> float:
        """Return the least time: that of the FLOPs or of the bytes, whichever is longer."""
        return max(self.flops / flops_per_second, self.num_bytes / bytes_per_second)


def kernel_costs(shape: Shape) -> list[KernelCost]:
    """Return the costs of all Triton kernels in a training step, in the order in which they run."""
    pairs = shape.num_tokens * shape.k
    matrix = shape.num_experts * shape.d_model * shape.d_ff  # gate, up or down of all experts
    tokens, rows = shape.num_tokens * shape.d_model, pairs * shape.d_model
    hidden = pairs * shape.d_ff
    product = 2 * hidden * shape.d_model
    elements = {
        "hidden": (2 * product, tokens + 2 * matrix + 3 * hidden),
        "product: down": (product, hidden + matrix + rows),
        "combine: output": (2 * rows, rows + tokens),
        "hidden gradient": (product, tokens + matrix + 5 * hidden),
        "weight gradient: down": (product, tokens + hidden + matrix),
        "weight gradient: gate and up": (2 * product, tokens + 2 * hidden + 2 * matrix),
        "product: input": (2 * product, 2 * (hidden + matrix) + rows),
        "combine: input": (rows, rows + tokens),
    }
    size = 4 if shape.dtype == "fp32" else 2
    return [KernelCost(name, flops, size * count) for name, (flops, count) in elements.items()]


def parse_shape(text: str) -> Shape:
    """Parse `2048,512,512,8,2,fp32`; ConfigError for another text, or if memory cannot hold the layer."""
    *typed, dtype = (part.strip() for part in text.split(","))
    sizes = [whole_number(number, least=1) or 0 for number in typed]
    if len(sizes) != 5 or not all(sizes) or dtype not in DTYPES:
        raise ConfigError(
            f"--shape {text}: must be T,D,F,E,K,dtype, five whole numbers from 1 to {MAX_COUNT} and one of "
            f"{', '.join(DTYPES)}, as in --shape 2048,512,512,8,2,fp32"
        )
    shape = Shape(*sizes, dtype=dtype)
    if shape.k > shape.num_experts:
        raise ConfigError(
            f"--shape {text}: K ({shape.k}) must not exceed E ({shape.num_experts}); lower K or raise E"
        )
    # A lower bound: a step needs far more than the weights, the input and the hidden values.
    weights = 3 * shape.num_experts * shape.d_model * shape.d_ff
    tokens = shape.num_tokens * (shape.d_model + shape.active_width)
    num_bytes = (4 if dtype == "fp32" else 2) * (weights + tokens)
    limit = memory_limit()
    if limit is not None and num_bytes > limit:
        raise ConfigError(
            f"--shape {text}: needs {gigabytes(num_bytes)} of memory, but this process may use "
            f"{gigabytes(limit)}; lower T, D, F or E"
        )
    return shape
