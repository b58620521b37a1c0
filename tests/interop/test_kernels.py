"""Our kernels and blocks inside the models of transformers: equal numbers, or a rejection by name."""

from __future__ import annotations

import copy
import math
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe_ffn import ConfigError, DenseConfig
from moe_ffn.interop import kernels_in_use, register, swap_ffn, watch
from moe_ffn.interop.kernels import weights_of
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


# -- `swap_ffn`: our blocks in dense models compute what was there, or train anew

GPT2: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4}
DENSE: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {}, "swiglu"),
    "llama-bias": ("llama", {"mlp_bias": True}, "swiglu"),
    "llama-bf16": ("llama", {"dtype": torch.bfloat16}, "swiglu"),
    "llama-gelu": ("llama", {"hidden_act": "gelu"}, "geglu"),
    "gemma": ("gemma", {}, "geglu_tanh"),
    "qwen2": ("qwen2", {}, "swiglu"),
    "qwen3": ("qwen3", {}, "swiglu"),
    "gpt2": ("gpt2", GPT2, "dense"),
    "gpt2-relu": ("gpt2", {**GPT2, "activation_function": "relu"}, "dense"),
}
IDS_BS = torch.tensor([[5, 9, 33, 7], [21, 40, 8, 3]])
MOE = {"type": "moe", "num_experts": 4, "router": {"type": "top_k", "k": 2, "renormalize": True}}


def dense_model(family: str, dtype: torch.dtype = torch.float32, **options: Any) -> Any:
    model = model_of(family, options).to(dtype)
    for name, parameter in model.named_parameters():
        if "mlp" in name:  # so that what is lost of an FFN shows, biases too
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize(("family", "options", "block"), DENSE.values(), ids=DENSE)
def test_a_dense_block_computes_the_same_as_the_ffn_it_replaces(
    family: str, options: dict[str, Any], block: str
) -> None:
    model = dense_model(family, **options)
    expected = model(IDS_BS).logits

    swap_ffn(model, [0, 1], block)

    found = model(IDS_BS).logits
    assert sum(type(module).__name__ == "SwappedFFN" for module in model.modules()) == 2
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["llama-bias", "gpt2", "llama-bf16"])
def test_experts_that_are_copies_compute_the_same_as_the_ffn(name: str) -> None:
    family, options, _ = DENSE[name]
    model = dense_model(family, **options)
    expected = model(IDS_BS).logits

    swap_ffn(model, [1], MOE)
    with watch(model) as passes:
        found = model(IDS_BS, attention_mask=torch.tensor([[0, 1, 1, 1], [1, 1, 1, 1]])).logits

    rounding = 0.05 if found.dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found[1], expected[1], atol=rounding, rtol=rounding)
    (routing,) = passes[0].values()
    assert list(passes[0]) == ["layer_01"]
    assert (routing.num_tokens, routing.num_experts, int(routing.num_real_tokens)) == (8, 4, 7)


@pytest.mark.parametrize("name", ["llama", "gpt2", "llama-bf16"])
def test_experts_that_change_the_outputs_cause_a_warning(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A token's softmax weights sum to less than 1 without `renormalize`, differently for each token."""
    family, options, _ = DENSE[name]
    model = dense_model(family, **options)
    expected = model(IDS_BS).logits

    swap_ffn(model, [0, 1], {**MOE, "router": {"type": "top_k", "k": 2}})

    (message,) = caplog.messages
    said = re.fullmatch(
        r"swap_ffn: the experts of layer 0, 1 are copies of the FFN, but change its output by up to (.*) of "
        r"its largest value; set config\.router\.renormalize: true to keep it, or train the model before you "
        r"use it",
        message,
    )
    assert said is not None
    assert float(said[1]) > 0.001
    assert not torch.allclose(model(IDS_BS).logits, expected, atol=1e-3)


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"router": {"type": "top_k", "k": 1}}, "; train the model before you use it"),
        (
            {"capacity": {"factor": 0.25, "eval_factor": 0.25}},
            "; set config.capacity.eval_factor: null to keep it, or train the model before you use it",
        ),
        ({}, ""),
    ],
    ids=["one expert", "dropped pairs", "the same"],
)
def test_the_advice_names_the_option_that_keeps_the_output(
    options: dict[str, Any], advice: str, caplog: pytest.LogCaptureFixture
) -> None:
    swap_ffn(dense_model("llama"), [1], MOE | options)

    assert len(caplog.messages) == bool(advice)
    assert all(message.endswith(advice) for message in caplog.messages)


def test_a_swapped_model_generates_and_trains() -> None:
    model = dense_model("qwen3")
    given = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(IDS_BS)}
    before = model.generate(IDS_BS, **given)
    swap_ffn(model, [0, 1], MOE)

    assert model.generate(IDS_BS, **given).tolist() == before.tolist()
    model.train()
    model(IDS_BS).logits.square().mean().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []


def test_the_dropout_of_gpt2_stays_and_the_mode_too() -> None:
    model = dense_model("gpt2", **GPT2, resid_pdrop=0.5).train()
    swap_ffn(model, [0], "dense")
    swapped = model.transformer.h[0].mlp

    assert swapped.training
    assert swapped.block.training
    share = (swapped(torch.randn(1, 200, 32)) == 0).float().mean()
    assert 0.4 < share < 0.6


def test_any_other_block_begins_with_new_weights() -> None:
    model = dense_model("llama")
    swap_ffn(model, [0], {"type": "conv", "kernel_size": 1, "d_ff": 24})
    assert model.model.layers[0].mlp.block.up.linear.out_features == 24
    assert model(IDS_BS).logits.isfinite().all()


@pytest.mark.parametrize(
    ("family", "layers", "config", "sentence"),
    [
        ("llama", [0, 2], "swiglu", "^swap_ffn: layer 2 of Llama.*; these layers have one: 0, 1$"),
        ("qwen2_moe", [0], "swiglu", "layer 0 of Qwen2MoeForCausalLM has no dense FFN that can "
         "be swapped .*; no layer has one"),
        ("llama", [0], "geglu", "config.type is 'geglu', but the FFN of layer 0 has 'swiglu'"),
        ("llama", [0], "dense", "config.type is 'dense', but .* has 'swiglu'; give that"),
        ("llama", [0], {"type": "swiglu", "d_ff": 40}, "config.d_ff is 40, but .* has 24; leave"),
        ("gpt2", [0], DenseConfig(activation="gelu"), "activation is 'gelu', but .* 'gelu_tanh'"),
        ("llama", [0], "soft_moe", "the model is causal, but config.* mixes"),
        ("llama", [0], {"type": "swiglo"}, "config.*swiglo"),
        ("llama", [0], {**MOE, "experts": "mlp"}, "experts.type: the experts compute"),
        ("gemma", [0], "geglu", "config.type is 'geglu', but the FFN of layer 0 has 'geglu_tanh'"),
        ("mish", [0], "geglu", "LlamaMLP, has the activation .* which our dense and gated"),
    ],
)  # fmt: skip
def test_what_cannot_take_the_place_is_named_and_nothing_changes(
    family: str, layers: list[int], config: Any, sentence: str
) -> None:
    more = {"gpt2": GPT2, "mish": {"hidden_act": "mish"}}.get(family, {})
    model = dense_model("llama" if family == "mish" else family, **more)
    names = list(model.state_dict())

    with pytest.raises(ConfigError, match=sentence):
        swap_ffn(model, layers, config)

    assert list(model.state_dict()) == names


def test_an_ffn_that_does_more_than_its_matrices_say_is_rejected() -> None:
    model = dense_model("llama")
    mlp = model.model.layers[0].mlp
    plain = copy.copy(mlp.forward)
    mlp.forward = lambda x: 2 * plain(x)
    with pytest.raises(ConfigError, match="LlamaMLP, computes more than its matrices"):
        swap_ffn(model, [0], "swiglu")
