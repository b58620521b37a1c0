"""Our kernels inside the models of transformers: the numbers of its own, and a refusal by name where not."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ffn.interop import kernels_in_use, register
from moe_ffn.interop.transformers import weights_of
from moe_ffn.kernels.activations import ClampedGate
from tests.helpers.transformers_models import FAMILIES, LATENT, model_of


@pytest.fixture(autouse=True)
def _registered() -> None:
    register()
    # Of yarn on a model this short, and of kernels that are not installed.
    warnings.filterwarnings("ignore", category=UserWarning, module="transformers")


def step(model: Any, implementation: str) -> tuple[Tensor, dict[str, Tensor]]:
    model.set_experts_implementation(implementation)
    model.zero_grad()
    ids_BS = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(1))
    logits = model(input_ids=ids_BS, use_cache=False).logits
    logits.square().mean().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    return logits.detach(), gradients


LIVE = {**FAMILIES, "deepseek_v4": LATENT}


@pytest.mark.parametrize(("family", "options"), LIVE.items(), ids=LIVE)
def test_a_model_computes_the_same_with_our_kernels(family: str, options: dict[str, Any]) -> None:
    model = model_of(family, options)
    logits, gradients = step(model, "grouped_mm")

    ours, our_gradients = step(model, "moe_ffn")

    assert any(hasattr(module, "is_transposed") for module in model.modules())
    torch.testing.assert_close(ours, logits, atol=1e-5, rtol=1e-5)
    assert our_gradients.keys() == gradients.keys()
    for name, value in gradients.items():
        scale = value.abs().max().clamp(min=1e-6)
        assert ((our_gradients[name] - value).abs().max() / scale).item() < 1e-5, name


@pytest.mark.parametrize("family", ["mixtral", "gpt_oss", "deepseek_v3", "olmoe"])
def test_it_generates_what_eager_generates(family: str) -> None:
    model = model_of(family, FAMILIES[family])
    given = {"input_ids": torch.tensor([[5, 9, 33]]), "max_new_tokens": 12, "do_sample": False}
    texts = []
    for implementation in ("eager", "moe_ffn"):
        model.set_experts_implementation(implementation)
        texts.append(model.generate(**given, pad_token_id=0).tolist())
    assert texts[0] == texts[1]
    assert len(texts[0][0]) > 6


def test_experts_of_other_ranks_are_not_computed() -> None:
    model = model_of("mixtral", {})
    experts = next(m for m in model.modules() if hasattr(m, "is_transposed"))
    model.set_experts_implementation("moe_ffn")
    x_TD = torch.randn(3, 32, generator=torch.Generator().manual_seed(2))
    ids_TK = torch.tensor([[0, 4], [4, 4], [1, 2]])  # 4 stands for all that are elsewhere
    weights_TK = torch.tensor([[0.5, 0.0], [0.0, 0.0], [0.3, 0.7]])

    y_TD = experts(x_TD, ids_TK, weights_TK)

    alone = experts(x_TD[:1], ids_TK[:1, :1], weights_TK[:1, :1])
    torch.testing.assert_close(y_TD[:1], alone)
    assert torch.equal(y_TD[1], torch.zeros(32))


def gate_that(gate: Callable[[Tensor, Tensor], Tensor], **attributes: float) -> nn.Module:
    experts: Any = next(m for m in model_of("mixtral", {}).modules() if hasattr(m, "is_transposed"))
    experts._apply_gate = lambda both: gate(*both.chunk(2, dim=-1))
    for name, value in attributes.items():
        setattr(experts, name, value)
    return experts


@pytest.mark.parametrize("limit", [2.0, 30.0, math.inf])
@pytest.mark.parametrize("prefix", ["", "swiglu_"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_gates_with_and_without_clamps_are_distinguished(
    after: bool, prefix: str, limit: float
) -> None:
    wanted = ClampedGate(alpha=1.0, limit=limit, added=0.0, after=after)
    weights = weights_of(gate_that(wanted, **{f"{prefix}limit": limit}))
    assert weights.activation == "silu"
    assert (weights.gate_function is None) == math.isinf(limit)
    gate, up = torch.randn(2, 1000, generator=torch.Generator().manual_seed(1)) * 20
    found = (
        nn.functional.silu(gate) * up
        if weights.gate_function is None
        else weights.gate_function(gate, up)
    )
    torch.testing.assert_close(found, wanted(gate, up))


def test_what_is_none_of_our_experts_is_named() -> None:
    with pytest.raises(NotImplementedError) as caught:
        weights_of(gate_that(lambda gate, up: gate.sin() * up, limit=7.0))
    assert str(caught.value) == (
        "moe_ffn does not compute MixtralExperts, which has a custom gate; use another "
        "experts_implementation for this model"
    )


def test_rows_of_gate_and_up_that_take_turns_are_not_copied() -> None:
    experts = next(m for m in model_of("gpt_oss", {}).modules() if hasattr(m, "is_transposed"))
    weights = weights_of(experts)
    assert weights.interleaved
    assert weights.up_EHD.data_ptr() == experts.gate_up_proj.data_ptr()
    assert weights.down_EDF.data_ptr() == experts.down_proj.data_ptr()


@pytest.mark.parametrize("family", ["mixtral", "nemotron_h", "granitemoe"])
def test_the_implementation_of_each_layer_is_told(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(family, {})
    layers = kernels_in_use(model)
    assert layers
    assert set(layers.values()) == {"eager"}
    model.set_experts_implementation("moe_ffn")
    assert kernels_in_use(model) == dict.fromkeys(layers, "moe_ffn")
    assert not caplog.records


@pytest.mark.parametrize("family", ["llama4_text", "jetmoe", "doge"])
def test_experts_that_ignore_the_choice_are_told(
    family: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = model_of(family, {"is_moe": True, "interleave_moe_layer_step": 1})
    model.config._experts_implementation = "moe_ffn"  # as from_pretrained does, without a word
    assert kernels_in_use(model) == {"layer_00": "eager", "layer_01": "eager"}
    assert caplog.messages == [
        f"experts_implementation is 'moe_ffn', but 2 of 2 sparse layers of {type(model).__name__} ignore "
        "it (layer_00)"
    ]
