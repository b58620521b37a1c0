"""Memory that a layer keeps for backward, and memory of large gradients that is used again."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import MixtralConfig
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

from experiments.benchmark.suites import saved_bytes
from moe_ffn import build_ffn
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.kernels import cpu as gradient_memory


@pytest.fixture(autouse=True)
def _every_gradient_is_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gradient_memory, "LARGE_BYTES", 0)


@pytest.fixture
def layer() -> MoEFFN:
    torch.manual_seed(0)
    config = {"type": "moe", "num_experts": 4, "experts": {"type": "swiglu", "backend": "cpu"}}
    layer = build_ffn(config, d_model=8)
    assert isinstance(layer, MoEFFN)
    return layer


def step(layer: MoEFFN, x_TD: Tensor) -> nn.Parameter:
    layer(x_TD).hidden.square().sum().backward()
    parameter: Any = layer.experts.down
    return parameter


def test_memory_of_a_deleted_gradient_is_reused(layer: MoEFFN) -> None:
    x_TD = torch.randn(12, 8)
    first = step(layer, x_TD).grad
    assert first is not None
    address, values = first.data_ptr(), first.clone()
    del first
    layer.zero_grad()

    second = step(layer, x_TD).grad
    assert second is not None
    assert second.data_ptr() == address
    torch.testing.assert_close(second, values, rtol=0, atol=0)


def test_memory_of_a_referenced_gradient_is_not_reused(layer: MoEFFN) -> None:
    first = step(layer, torch.randn(12, 8)).grad
    assert first is not None
    part, values = first[1:].detach(), first[1:].clone()
    del first
    layer.zero_grad()

    step(layer, torch.randn(12, 8))
    torch.testing.assert_close(part, values, rtol=0, atol=0)


def test_memory_begins_at_a_cache_line(layer: MoEFFN) -> None:
    gradient = step(layer, torch.randn(12, 8)).grad
    assert gradient is not None
    assert gradient.data_ptr() % gradient_memory.ALIGNMENT == 0


def test_memory_goes_with_its_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    class Buffer(bytearray):
        """A bytearray that allows weak references."""

    monkeypatch.setattr(gradient_memory, "bytearray", Buffer, raising=False)
    weight = nn.Parameter(torch.randn(3, 4))
    gradient = gradient_memory.empty_gradient(weight)
    (buffer,) = map(weakref.ref, gradient_memory._buffers[weight])

    del weight
    gc.collect()
    assert buffer() is not None  # the gradient has it
    del gradient
    gc.collect()
    assert buffer() is None


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


# -- on a GPU no step waits for the device: `loop` and `cpu` read the loads of experts, others must not

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
        # Of such tensors, F.grouped_mm takes only bfloat16.
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

    def reject(name: str) -> None:
        allowed = getattr(Tensor, name)

        def read(*arguments: Any, **named: Any) -> Any:
            # The interpreter reads tensors: it is the device here.
            callers = {sys._getframe(1).f_globals.get("__name__", "")}
            assert any(caller.startswith(("triton.", "torch.")) for caller in callers), name
            return allowed(*arguments, **named)

        monkeypatch.setattr(Tensor, name, read)

    for name in READ_ON_THE_HOST:
        reject(name)
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
