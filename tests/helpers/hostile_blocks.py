"""Blocks, backends and tokens that the attacks on layers share."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ffn import FFNBlock, RouterConfig, TokenContext, build_ffn
from moe_ffn.kernels.select import BACKENDS

D_MODEL = 8
SHAPE = (2, 6)
REAL = torch.ones(SHAPE, dtype=torch.bool)
REAL[0, 4:] = False

BLOCKS: dict[str, Any] = {
    "identity": "identity",
    "dense": {"type": "dense", "bias": True},
    "swiglu": "swiglu",
    "conv": "conv",
    "conv-1": {"type": "conv", "kernel_size": 1},
    "soft_moe": {"type": "soft_moe", "num_experts": 2, "slots_per_expert": 3},
    "chain": "chain_of_experts",
    "ngrams": {"type": "ngram_memory", "num_rows": 50, "ffn": "dense"},
    "depths": "mixture_of_depths",
    "depths-dense": {"type": "mixture_of_depths", "ffn": "dense"},
    "depths-moe": {"type": "mixture_of_depths", "ffn": {"type": "moe", "num_experts": 4}},
    **{
        f"moe-{router}": {"type": "moe", "num_experts": 4, "router": router}
        for router in RouterConfig.members
    },
    "moe-conv": {"type": "moe", "num_experts": 4, "shared_expert": "conv"},
    "moe-gate": {
        "type": "moe",
        "num_experts": 4,
        "shared_expert": "swiglu",
        "combine": "sigmoid_gate",
    },
    "moe-residual": {
        "type": "moe",
        "num_experts": 4,
        "shared_expert": "dense",
        "combine": "residual",
    },
    "moe-zero": {
        "type": "moe",
        "num_experts": 3,
        "zero_computation": {"num_zero": 1, "num_copy": 1, "num_constant": 2},
    },
    "moe-limited": {
        "type": "moe",
        "num_experts": 4,
        "capacity": {"factor": 0.5, "eval_factor": 0.5, "renormalize": True},
    },
}

every_block = pytest.mark.parametrize("name", BLOCKS)
every_backend = pytest.mark.parametrize("backend", sorted(BACKENDS))


def build(config: Any) -> FFNBlock:
    torch.manual_seed(0)
    return build_ffn(config, D_MODEL)


def build_on(backend: str, **options: Any) -> Any:
    """An MoE of experts with biases, under which rows that nobody computes would show."""
    experts = {"type": "swiglu", "d_ff": 8, "bias": True, "backend": backend}
    experts |= options.pop("experts", {})
    return build({"type": "moe", "num_experts": 4, "experts": experts, **options})


def tokens(*shape: int, seed: int = 1) -> Tensor:
    return torch.randn(*(shape or SHAPE), D_MODEL, generator=torch.Generator().manual_seed(seed))


def context(mask: Tensor | None = None) -> TokenContext:
    return TokenContext(mask, torch.arange(12).view(SHAPE))


def run(block: nn.Module, x: Tensor, given: TokenContext | None = None) -> Tensor:
    """The hidden values, drawn alike every time."""
    torch.manual_seed(2)
    return block(x, context() if given is None else given).hidden


def gradients(block: nn.Module, x: Tensor, hidden: Tensor) -> dict[str, Tensor]:
    """Of the sum of squares, by parameter; `x` itself too; without those that are not used."""
    wanted = {"x": x, **dict(block.named_parameters())}
    found = torch.autograd.grad(hidden.square().sum(), list(wanted.values()), allow_unused=True)
    return {name: grad for name, grad in zip(wanted, found, strict=True) if grad is not None}


def assert_all_close(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    for name, value in wanted.items():
        torch.testing.assert_close(got[name], value, rtol=1e-4, atol=1e-5)
