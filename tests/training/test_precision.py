"""Which number format `auto` stands for, and what bf16-mixed leaves in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn.ffn import FFNConfig
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.outputs import FFNOutput
from moe_ffn.training.config import resolve_precision
from moe_ffn.training.objective import ObjectiveConfig, objective


@pytest.mark.parametrize(
    ("precision", "device", "has_bfloat16", "resolved"),
    [
        ("auto", "cpu", True, "32-true"),
        ("auto", "mps", True, "32-true"),
        ("auto", "cuda", True, "bf16-mixed"),
        ("auto", "cuda", False, "32-true"),
        *((name, "cpu", True, name) for name in ("64-true", "32-true", "bf16-mixed", "bf16-true")),
        ("16-mixed", "cuda", True, "16-mixed"),
    ],
)
def test_auto_is_resolved_by_the_kind_of_device(
    monkeypatch: pytest.MonkeyPatch, precision: str, device: str, has_bfloat16: bool, resolved: str
) -> None:
    def supported(including_emulation: bool = True) -> bool:
        return has_bfloat16 or including_emulation

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", supported)

    assert resolve_precision(precision, device) == resolved


MIXED_MODELS: dict[str, dict[str, Any]] = {
    "swiglu": {"type": "swiglu"},
    # Evenly weighted experts at fixed places: where rounding changes a choice, the gradient jumps.
    "moe": {"type": "moe", "num_experts": 4, "router": {"type": "hash", "k": 2}},
}


@pytest.mark.parametrize("name", MIXED_MODELS)
def test_a_gradient_in_bf16_mixed_is_that_of_float64_but_for_rounding(name: str) -> None:
    """8 bits of mantissa leave about 1 % of noise and no bias: nothing else is lost on the way."""
    torch.manual_seed(0)
    ffn = FFNConfig.model_validate(MIXED_MODELS[name])
    model = DecoderConfig(d_model=64, num_layers=2, ffn=ffn).build(vocab_size=64, max_seq_len=64)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            parameter.data.mul_(2)  # away from the even scores of fresh weights
    tokens = torch.randint(64, (8, 65))

    def gradients(dtype: torch.dtype) -> dict[str, Tensor]:
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
            output = model(tokens[:, :-1])
            losses = objective(output.logits, tokens[:, 1:], output.routings, ObjectiveConfig())
        losses.total.backward()
        return {name: p.grad.double() for name, p in model.named_parameters() if p.grad is not None}

    mixed, whole = gradients(torch.bfloat16), gradients(torch.float32)
    model.double()
    exact = gradients(torch.float64)

    assert mixed.keys() == exact.keys()
    for parameter, expected in exact.items():
        noise = (mixed[parameter] - expected).norm() / expected.norm()
        scale = (mixed[parameter] * expected).sum() / expected.square().sum()
        assert noise < 0.03, parameter
        assert scale.item() == pytest.approx(1, abs=0.01), parameter
        assert (whole[parameter] - expected).norm() < 1e-4 * expected.norm(), parameter


def test_bf16_mixed_keeps_stream_norms_router_and_optimizer_in_float32() -> None:
    model = DecoderConfig(d_model=32, num_layers=2).build(vocab_size=16, max_seq_len=8)
    optimizer = torch.optim.AdamW(model.parameters())
    seen: dict[str, torch.dtype] = {}

    def watch(name: str) -> Any:
        def hook(_module: torch.nn.Module, _inputs: Any, output: Any) -> None:
            if isinstance(output, FFNOutput):
                output = output.hidden
            if isinstance(output, Tensor):
                seen[name] = output.dtype

        return hook

    for name, module in model.named_modules():
        module.register_forward_hook(watch(name))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(torch.randint(16, (2, 8))).logits
    logits.float().square().mean().backward()
    optimizer.step()

    assert seen["layers.0.attention"] == torch.bfloat16  # autocast was on
    wide = ("embedding", "layers.0", "layers.1", "layers.0.attention_norm", "layers.0.ffn_norm")
    wide += ("final_norm", "layers.0.ffn.router.projection")
    assert {name: seen[name] for name in wide} == dict.fromkeys(wide, torch.float32)
    states = [state for values in optimizer.state.values() for state in values.values()]
    assert {state.dtype for state in states} == {torch.float32}
