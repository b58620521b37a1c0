"""Memory that a layer keeps for backward, compared with the block that Hugging Face would train."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from experiments.benchmark.suites import saved_bytes
from moe_ffn import build_ffn

T, D, F, E, K = 256, 128, 128, 8, 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm"])
def test_at_most_half_of_what_the_published_block_keeps(
    implementation: str, dtype: torch.dtype
) -> None:
    options: dict[str, Any] = {
        "hidden_size": D,
        "intermediate_size": F,
        "num_local_experts": E,
        "num_experts_per_tok": K,
        "experts_implementation": implementation,
    }
    config = MixtralConfig(**options)
    theirs = MixtralSparseMoeBlock(config)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.normal_(std=0.1)
    router = {"type": "top_k", "k": K, "renormalize": True}
    experts = {"type": "swiglu", "d_ff": F}
    ours = build_ffn(
        {"type": "moe", "num_experts": E, "router": router, "experts": experts}, d_model=D
    )
    x = torch.randn(1, T, D, dtype=dtype).requires_grad_()
    mine, published = saved_bytes(ours.to(dtype), x), saved_bytes(theirs.to(dtype), x)
    pre_activations = T * K * 2 * F * dtype.itemsize
    assert mine >= pre_activations  # what cannot be had without a product more
    assert mine <= published / 2, f"{mine:,} of {published:,} bytes"
