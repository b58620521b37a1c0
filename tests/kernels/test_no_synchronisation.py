"""On a GPU no step waits for the device: nothing on the host depends on what a tensor holds.

`loop` and `cpu` do read the experts' loads; the backends for GPUs must not.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from moe_ffn import build_ffn
from moe_ffn.ffn.moe import MoEFFN

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
READ_ON_THE_HOST = (
    *("item", "tolist", "cpu", "numpy", "nonzero", "__bool__", "__int__", "__float__"),
    *("__index__", "__len__"),
)
LAYERS: dict[str, dict[str, Any]] = {
    "top_k": {"router": {"type": "top_k", "k": 2}},
    "top_k_with_capacity": {"router": {"type": "top_k", "k": 2}, "capacity": {"factor": 1.0}},
    "top_p": {"router": {"type": "top_p", "p": 0.5}},
    "relu": {"router": {"type": "relu", "k": 2}},
}


def build(backend: str, config: dict[str, Any], d_model: int = 16) -> MoEFFN:
    experts = {"type": "swiglu", "d_ff": 16, "bias": True, "backend": backend}
    layer = build_ffn({"type": "moe", "num_experts": 4, "experts": experts, **config}, d_model)
    assert isinstance(layer, MoEFFN)
    return layer


@pytest.mark.parametrize("backend", ["grouped_mm", "triton"])
@pytest.mark.parametrize("config", LAYERS.values(), ids=LAYERS)
def test_a_layer_runs_without_anything_in_its_tensors(config: dict[str, Any], backend: str) -> None:
    """Tensors without data: reading one raises, and so does a shape that depends on one."""
    if backend == "triton":
        pytest.importorskip("triton", reason="triton is not installed here")
    with FakeTensorMode(), torch.device(DEVICE):
        layer = build(backend, config)
        x = torch.empty(2, 5, 16, requires_grad=True)
        # Of such tensors, F.grouped_mm takes bfloat16 alone.
        with torch.autocast(DEVICE, dtype=torch.bfloat16):
            hidden = layer(x).hidden
        assert hidden.shape == x.shape
        hidden.sum().backward()
        assert x.grad is not None


def test_the_kernels_are_launched_without_reading_a_tensor(
    monkeypatch: pytest.MonkeyPatch, make_weights: Any, make_plan_of: Any
) -> None:
    pytest.importorskip("triton", reason="triton is not installed here")
    from moe_ffn.kernels.triton import backend

    plan, weights = make_plan_of([[0, 2], [0, None], [1, 2]], 3), make_weights()
    x_TD = torch.randn(3, weights.d_model, device=plan.offsets_E.device, requires_grad=True)

    def refuse(name: str) -> None:
        allowed = getattr(Tensor, name)

        def read(*arguments: Any, **named: Any) -> Any:
            # The interpreter reads tensors: it is the device here.
            callers = {sys._getframe(1).f_globals.get("__name__", "")}
            assert any(caller.startswith(("triton.", "torch.")) for caller in callers), name
            return allowed(*arguments, **named)

        monkeypatch.setattr(Tensor, name, read)

    for name in READ_ON_THE_HOST:
        refuse(name)
    backend.triton(x_TD, plan, weights).sum().backward()
    assert x_TD.grad is not None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU: nothing to wait for")
@pytest.mark.parametrize("backend", ["grouped_mm", "triton"])
@pytest.mark.parametrize("config", LAYERS.values(), ids=LAYERS)
def test_a_step_on_a_gpu_never_waits(config: dict[str, Any], backend: str) -> None:
    layer = build(backend, config, d_model=64).to("cuda", torch.bfloat16)
    x = torch.randn(2, 50, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).hidden.sum().backward()  # compiles the kernels and times them, which does wait
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        layer(x).hidden.sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
