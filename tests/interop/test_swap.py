"""`swap_ffn`: blocks of ours in live dense models of transformers compute what was there, or train anew."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_ffn import ConfigError, DenseConfig
from moe_ffn.interop import swap_ffn, watch

SIZES: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4}
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


def model_of(family: str, **options: Any) -> Any:
    torch.manual_seed(0)
    dtype = options.pop("dtype", torch.float32)
    config = CONFIG_MAPPING[family](**{**SIZES, **options})
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval()
    for name, parameter in model.named_parameters():
        if "mlp" in name:  # so that what is lost of an FFN shows, biases too
            nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize(("family", "options", "block"), DENSE.values(), ids=DENSE)
def test_a_dense_block_computes_the_same_as_the_ffn_it_replaces(
    family: str, options: dict[str, Any], block: str
) -> None:
    model = model_of(family, **options)
    expected = model(IDS_BS).logits

    swap_ffn(model, [0, 1], block)

    found = model(IDS_BS).logits
    assert sum(type(module).__name__ == "SwappedFFN" for module in model.modules()) == 2
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("name", ["llama-bias", "gpt2", "llama-bf16"])
def test_experts_that_are_copies_compute_the_same_as_the_ffn(name: str) -> None:
    family, options, _ = DENSE[name]
    model = model_of(family, **options)
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
    model = model_of(family, **options)
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
    swap_ffn(model_of("llama"), [1], MOE | options)

    assert len(caplog.messages) == bool(advice)
    assert all(message.endswith(advice) for message in caplog.messages)


def test_a_swapped_model_generates_and_trains() -> None:
    model = model_of("qwen3")
    given = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(IDS_BS)}
    before = model.generate(IDS_BS, **given)
    swap_ffn(model, [0, 1], MOE)

    assert model.generate(IDS_BS, **given).tolist() == before.tolist()
    model.train()
    model(IDS_BS).logits.square().mean().backward()
    missing = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.any()]
    assert missing == []


def test_the_dropout_of_gpt2_stays_and_the_mode_too() -> None:
    model = model_of("gpt2", **GPT2, resid_pdrop=0.5).train()
    swap_ffn(model, [0], "dense")
    swapped = model.transformer.h[0].mlp

    assert swapped.training
    assert swapped.block.training
    share = (swapped(torch.randn(1, 200, 32)) == 0).float().mean()
    assert 0.4 < share < 0.6


def test_any_other_block_begins_with_new_weights() -> None:
    model = model_of("llama")
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
        ("llama", [0], "dense", "config.type is 'dense', but the FFN of layer 0 has 'swiglu'"),
        ("llama", [0], {"type": "swiglu", "d_ff": 40}, "config.d_ff is 40, but .* has 48; leave"),
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
    model = model_of("llama" if family == "mish" else family, **more)
    names = list(model.state_dict())

    with pytest.raises(ConfigError, match=sentence):
        swap_ffn(model, layers, config)

    assert list(model.state_dict()) == names


def test_an_ffn_that_does_more_than_its_matrices_say_is_refused() -> None:
    model = model_of("llama")
    mlp = model.model.layers[0].mlp
    plain = copy.copy(mlp.forward)
    mlp.forward = lambda x: 2 * plain(x)
    with pytest.raises(ConfigError, match="LlamaMLP, computes more than its matrices"):
        swap_ffn(model, [0], "swiglu")
