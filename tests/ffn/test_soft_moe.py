"""Soft MoE against its equations in plain loops, output and gradients, with and without padding."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import TokenContext, build_ffn
from moe_ffn.kernels.select import BACKENDS

CONFIG = {"type": "soft_moe", "num_experts": 3, "slots_per_expert": 2}


def build(backend: str) -> Any:
    torch.manual_seed(0)
    experts = {"type": "swiglu", "d_ff": 8, "backend": backend}
    ffn = build_ffn({**CONFIG, "experts": experts}, d_model=8)
    return ffn if backend == "grouped_mm" else ffn.double()


def by_loops(ffn: Any, x_SD: Tensor) -> Tensor:
    """One sequence of real tokens: equations 1 to 3, slot by slot and token by token."""
    unit = [x / x.norm() for x in x_SD]
    slots = [ffn.scale * slot / slot.norm() for slot in ffn.slots_PD]
    logits = torch.stack([torch.stack([x @ slot for slot in slots]).squeeze(-1) for x in unit])
    outputs = []
    for p in range(len(slots)):
        shares = logits[:, p].exp() / logits[:, p].exp().sum()
        mean = torch.stack([share * x for share, x in zip(shares, x_SD, strict=True)]).sum(0)
        e = p // 2  # two slots per expert
        gate, up = ffn.experts.gate[e] @ mean, ffn.experts.up[e] @ mean
        outputs.append(ffn.experts.down[e] @ (gate * gate.sigmoid() * up))
    y = []
    for row in logits:
        shares = row.exp() / row.exp().sum()
        y.append(torch.stack([share * y for share, y in zip(shares, outputs, strict=True)]).sum(0))
    return torch.stack(y)


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_output_and_gradients_equal_the_loops(
    backend: str, padded: bool, tokens_and_mask: Any, dtype_of: Any, gradients: Any
) -> None:
    ffn, reference = build(backend), build("loop")
    reference.load_state_dict(ffn.state_dict())
    x, mask = tokens_and_mask(dtype_of(backend), padded)
    x_reference = x.double().requires_grad_()
    rows = []
    for sequence, real in zip(x_reference, mask, strict=True):
        y = torch.zeros_like(sequence)
        rows.append(y.index_put((real.nonzero().squeeze(-1),), by_loops(reference, sequence[real])))
    wanted = gradients(reference, x_reference, torch.stack(rows))

    x.requires_grad_()
    hidden = ffn(x, TokenContext(mask=mask)).hidden
    tolerance = 1e-5 if backend == "grouped_mm" else 1e-12  # float32 and float64
    torch.testing.assert_close(hidden.double(), torch.stack(rows), rtol=tolerance, atol=tolerance)
    for name, gradient in gradients(ffn, x, hidden).items():
        torch.testing.assert_close(
            gradient.double(), wanted[name], rtol=10 * tolerance, atol=10 * tolerance, msg=name
        )
