"""Exported models have our logits in transformers; options without an equivalent are rejected by path."""

from __future__ import annotations

import copy
import json
import re
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, pipeline

from moe_ffn import ConfigError, Decoder, DecoderConfig
from moe_ffn.data.tokenizer import BPETokenizer, BytesTokenizer, train_bpe
from moe_ffn.hf import export_gguf, export_transformers, load_transformers
from moe_ffn.hf.to_transformers import choose_architecture
from tests.helpers.theirs import MODELS, SIZES, change, logits, save

ATTENTION = {"num_heads": 4, "num_kv_heads": 2}
SHARED, SIGMOID = {"type": "swiglu", "d_ff": 20}, {"type": "sigmoid_top_k"}
LATENT = {"num_heads": 4, "head_dim": 10, "latent": {"kv_rank": 12, "rotated_dim": 6}}


def decoder_of(vocab_size: int = SIZES["vocab_size"], **options: Any) -> Decoder:
    given = {"d_model": 32, "num_layers": 3, "attention": ATTENTION, "ffn": "swiglu", **options}
    decoder = DecoderConfig.model_validate(given).build(vocab_size, 48).eval()
    generator = torch.Generator().manual_seed(3)
    for name, tensor in decoder.state_dict().items():
        deviation = 1.0 if name == "embedding.weight" else 0.3 if tensor.ndim > 1 else 0.2
        tensor.normal_(mean=float("norm" in name), std=deviation, generator=generator)
    return decoder


def moe(**options: Any) -> dict[str, Any]:
    """An MoE whose options are given by path, with __ for dots."""
    block: dict[str, Any] = {
        "type": "moe",
        "num_experts": 5,
        "experts": {"type": "swiglu", "d_ff": 24},
        "router": {"type": "top_k"},
    }
    for path, value in options.items():
        place = block
        *parents, key = path.split("__")
        for parent in parents:
            place = place.setdefault(parent, {})
        place[key] = value
    return block


CLAMPED = moe(
    num_experts=6,
    router={"type": "top_k", "softmax": "after", "bias": True},
    experts={"type": "clamped_swiglu", "d_ff": 24, "bias": True, "alpha": 1.5, "limit": 2.0},
)
SINKS = {**ATTENTION, "head_dim": 12, "bias": True, "sinks": True}
ROUTED_BY_SIGMOID = moe(router=SIGMOID, shared_expert={"type": "swiglu", "d_ff": 48})
LLAMA3 = {"type": "llama3", "factor": 8.0, "original_seq_len": 12}
YARN = {"type": "yarn", "factor": 4.0, "original_seq_len": 12}


def read(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def assert_equal_there(decoder: Decoder, folder: Path) -> Any:
    theirs, ours = read(folder), logits(decoder)
    assert ours.abs().max() > 1
    torch.testing.assert_close(logits(theirs), ours, atol=1e-4, rtol=0)
    return theirs


CHANGED = {
    *(f"{kind}_token_id" for kind in ("bos", "eos", "pad")),  # without a tokenizer
    *("intermediate_size", "moe_intermediate_size"),  # of layers that there are none of
    *("decoder_sparse_step", "mlp_only_layers"),  # two ways to say the same
    "max_window_layers",  # the layers are listed
    "rope_parameters",  # coefficients are multiplied, and defaults written
    *("num_nextn_predict_layers", "_name_or_path"),
    "qkv_bias",  # biases of zeros are written
}
"""Options of transformers without effect."""


LIKE_OTHERS = {
    *("deepseek_v3-direct", "deepseek_v3-no-groups", "deepseek_v3-yarn", "glm4_moe-yarn"),
    *("llama-linear", "mixtral-window", "mixtral-yarn", "olmoe-renormalised"),
    *("qwen2_moe-even-windows", "qwen2_moe-renormalised", "qwen3_moe-renormalised"),
    "qwen3_moe-window",
}
"""Models whose options are written for another model by the same lines."""


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in LIKE_OTHERS)) for name in MODELS],
)
def test_there_and_back_no_bit_is_changed(name: str, tmp_path: Path) -> None:
    save(name, tmp_path / "theirs")
    decoder = load_transformers(tmp_path / "theirs")

    export = export_transformers(decoder, tmp_path / "back")

    before, after = (
        load_file(tmp_path / which / "model.safetensors") for which in ("theirs", "back")
    )
    assert before.keys() <= after.keys()
    assert not any(after[key].any() for key in after.keys() - before.keys())
    assert all(torch.equal(after[key], value) for key, value in before.items())
    assert export.family.model_type == MODELS[name][0]
    assert_equal_there(decoder, tmp_path / "back")
    kept, written = (
        AutoConfig.from_pretrained(tmp_path / which).to_dict() for which in ("theirs", "back")
    )
    assert {k for k in kept if kept[k] != written.get(k)} <= CHANGED
    again = load_transformers(tmp_path / "back")
    assert all(torch.equal(again.state_dict()[k], v) for k, v in decoder.state_dict().items())


OURS: dict[str, tuple[dict[str, Any], str, str]] = {
    "dense": ({}, "llama", ""),
    "geglu": ({"ffn": "geglu"}, "llama", ""),
    "qkv": ({"attention": {**ATTENTION, "bias": "qkv"}}, "qwen2", ""),
    "norms": (
        {"attention": {**ATTENTION, "norm_qk": "head", "head_dim": 12}}, "qwen3", "",
    ),
    "default": (
        {"ffn": moe()}, "qwen2_moe",
        "ffn.shared_expert: the export adds one of 32 units, whose output is zero",
    ),
    "renormalised": ({"ffn": moe(router__renormalize=True)}, "mixtral", ""),
    "softmax after": ({"ffn": moe(router__softmax="after")}, "mixtral", ""),
    "a dense layer": (
        {"ffn": moe(router__renormalize=True), "ffn_at": {"1": {"type": "swiglu", "d_ff": 40}}}, "qwen2_moe",
        "",
    ),
    "heads normalised": (
        {"attention": {**ATTENTION, "norm_qk": "head"}, "ffn": moe(router__renormalize=True)}, "qwen3_moe",
        "",
    ),
    "all normalised": ({"attention": {**ATTENTION, "norm_qk": "all"}, "ffn": moe()}, "olmoe", ""),
    "shared": ({"ffn": moe(shared_expert=SHARED, combine__type="sigmoid_gate")}, "qwen2_moe", ""),
    "latent": (
        {
            "attention": LATENT,
            "ffn": moe(
                num_experts=6,
                router={**SIGMOID, "k": 3, "scale": 2.5, "groups": {"num_groups": 3, "keep": 2}},
                shared_expert={"type": "swiglu", "d_ff": 48},
            ),
            "ffn_at": {"0": {"type": "swiglu", "d_ff": 40}},
        },
        "deepseek_v3", "",
    ),
    "sigmoid": (
        {"positions": {"type": "rope", "fraction": 0.5}, "attention": {**ATTENTION, "bias": "qkv"},
         "ffn": ROUTED_BY_SIGMOID, "ffn_at": {":1": {"type": "swiglu", "d_ff": 40}}},
        "glm4_moe", "",
    ),
    "sigmoid, heads normalised": (
        {"attention": {**ATTENTION, "norm_qk": "head"}, "ffn": ROUTED_BY_SIGMOID}, "dots1", ""
    ),
    "sinks": (
        {
            "attention": {**SINKS, "window": 7, "window_at": "1:"}, "ffn": CLAMPED,
            "positions": {"type": "rope", "scaling": YARN},
        },
        "gpt_oss", "",
    ),
    "window": (
        {"attention": {**ATTENTION, "window": 7}}, "mistral", "",
    ),
    "window of a mixture": (
        {"attention": {**ATTENTION, "window": 7}, "ffn": moe(router__renormalize=True)}, "mixtral", "",
    ),
    "windows in two layers": (
        {"attention": {**ATTENTION, "window": 7, "window_at": ":2"}, "ffn": moe()}, "qwen2_moe", "",
    ),
    "scaled positions": ({"positions": {"type": "rope", "scaling": LLAMA3}}, "llama", ""),
    "scaled positions and scores": (
        {
            "positions": {"type": "rope", "scaling": {**YARN, "score_mscale": 0.7}},
            "attention": LATENT,
            "ffn": ROUTED_BY_SIGMOID,
        },
        "deepseek_v3", "",
    ),
    "k drawn in training": (
        {"ffn": moe(router={"type": "elastic_top_k", "k": 2, "renormalize": True})}, "mixtral", "",
    ),
    "rounded experts": (
        {"ffn": moe(router__renormalize=True, experts={"type": "fake_quantized", "format": "fp8"})},
        "mixtral", "the weights of the experts are written rounded to fp8",
    ),
    "in training": (
        {"dropout": 0.1, "ffn": moe(router__renormalize=True, router__jitter=0.1, capacity__factor=1.25)},
        "mixtral", "ffn.capacity.factor acts only in training and is left out",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "architecture", "note"), OURS.values(), ids=OURS)
def test_ours_is_the_architecture_of_the_same_routing(
    options: dict[str, Any], architecture: str, note: str, tmp_path: Path
) -> None:
    decoder = decoder_of(**options)

    export = export_transformers(decoder, tmp_path / "theirs")

    assert export.family.model_type == architecture
    assert any(said.startswith(note) for said in (*export.notes, "")), export.notes
    theirs = assert_equal_there(decoder, tmp_path / "theirs")
    assert theirs.config.eos_token_id is None
    back = load_transformers(tmp_path / "theirs")
    torch.testing.assert_close(logits(back), logits(decoder), atol=1e-5, rtol=0)


def test_names_are_those_that_other_libraries_read(tmp_path: Path) -> None:
    export_transformers(decoder_of(ffn=moe(router__renormalize=True)), tmp_path / "mixtral")
    names = load_file(tmp_path / "mixtral/model.safetensors").keys()
    assert {n for n in names if "layers.2.block" in n} == {
        "model.layers.2.block_sparse_moe.gate.weight",
        *(
            f"model.layers.2.block_sparse_moe.experts.{expert}.{which}.weight"
            for expert in range(5)
            for which in ("w1", "w2", "w3")
        ),
    }
    config = json.loads((tmp_path / "mixtral/config.json").read_text())
    assert config["rope_theta"] == config["rope_parameters"]["rope_theta"] == 10_000.0


def test_deepseek_names_its_scores_for_libraries_that_have_several(tmp_path: Path) -> None:
    options, *_ = OURS["latent"]
    export = export_transformers(decoder_of(**options), tmp_path / "theirs")
    assert export.options["scoring_func"] == "sigmoid"
    assert export.options["topk_method"] == "noaux_tc"
    change(tmp_path / "theirs", scoring_func="softmax")
    with pytest.raises(ConfigError, match=r"scoring_func is 'softmax', .* supported: 'sigmoid'"):
        load_transformers(tmp_path / "theirs")


def test_large_models_are_in_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("moe_ffn.weights.pretrained.MIN_FILE_BYTES", 2**12)
    decoder = decoder_of(ffn=moe())
    for parameter in decoder.parameters():
        parameter.data = parameter.data.bfloat16().float()
    export_transformers(copy.deepcopy(decoder).bfloat16(), tmp_path / "theirs")
    assert len(list((tmp_path / "theirs").glob("*.safetensors"))) > 4
    theirs = read(tmp_path / "theirs")
    assert {p.dtype for p in theirs.parameters()} == {torch.bfloat16}
    torch.testing.assert_close(logits(theirs.float()), logits(decoder), atol=1e-4, rtol=0)


TEXT = """def café(x_1):
\tif x_1 > 12345:  # für jede Zahl: 1,50 €, e\u0301 and ﬁ
\t\treturn  [x_1] * 3.1415  \r\n
   DON'T the the the
"""
"""Code, accents that a normalizer would change, digits, and spaces that a splitting rule would move."""


@pytest.mark.parametrize(
    ("model", "kind"),
    [
        pytest.param(
            model, kind, marks=[pytest.mark.slow] * ((kind == "bytes") != (model == "dense"))
        )
        for kind in ("bytes", "bpe")
        for model in (
            *("dense", "qkv", "norms", "renormalised", "heads normalised", "all normalised"),
            *("default", "latent", "sigmoid", "sigmoid, heads normalised", "window", "sinks"),
        )
    ],
)
def test_the_tokenizer_goes_along(model: str, kind: str, tmp_path: Path) -> None:
    ours = BytesTokenizer() if kind == "bytes" else train_bpe([TEXT.encode()] * 3, 600)
    export_transformers(decoder_of(**OURS[model][0]), tmp_path / "theirs", ours)

    theirs = AutoTokenizer.from_pretrained(tmp_path / "theirs")

    assert theirs.encode(TEXT) == ours.encode(TEXT.encode()).tolist()
    assert theirs.decode(theirs.encode(TEXT)) == TEXT
    assert theirs.eos_token_id == theirs.pad_token_id == ours.end_of_document
    assert read(tmp_path / "theirs").config.eos_token_id == ours.end_of_document


def test_qwen2_with_a_tokenizer_is_written_as_llama(tmp_path: Path) -> None:
    decoder = decoder_of(**OURS["qkv"][0])

    export = export_transformers(decoder, tmp_path / "theirs", BytesTokenizer())

    assert export.family.model_type == "llama"
    assert export.notes == (
        "attention.bias: the output projection gets a bias of zeros",
        "qwen2 would fit, but transformers replaces its tokenizer",
    )
    assert repr(export) == f"Export(LlamaForCausalLM: {'; '.join(export.notes)})"
    assert_equal_there(decoder, tmp_path / "theirs")


def test_notes_begin_with_losses_and_name_no_other_architecture() -> None:
    options: dict[str, Any] = {"ffn": moe(), "ffn_at": {"0": {"type": "swiglu", "d_ff": 40}}}
    notes = choose_architecture(decoder_of(**options, dropout=0.1)).notes
    assert notes[0] == "dropout acts only in training and is left out"
    assert notes[-1].startswith(
        "llama.cpp and mlx-lm require sparse layers only, not 1 dense (model.ffn_at)"
    )
    assert not any(note.startswith(("mixtral", "qwen3_moe", "olmoe")) for note in notes)


def test_two_texts_of_different_lengths_are_continued_together(tmp_path: Path) -> None:
    export_transformers(decoder_of(257, ffn=moe()), tmp_path / "theirs", BytesTokenizer())
    model, tokenizer = read(tmp_path / "theirs"), AutoTokenizer.from_pretrained(tmp_path / "theirs")

    def continued(*texts: str) -> list[list[int]]:
        batch = tokenizer(texts, padding=True, return_tensors="pt")
        return model.generate(**batch, max_new_tokens=8, do_sample=False)[:, -8:].tolist()

    both = continued("def", "a longer text")
    assert both == [*continued("def"), *continued("a longer text")]
    generate = pipeline("text-generation", model=model, tokenizer=tokenizer)
    assert len(generate(["def", "a longer text"], max_new_tokens=8, batch_size=2)) == 2


FOLDED: dict[str, tuple[dict[str, Any], str, tuple[str, ...]]] = {
    "llama": ({"scale_embeddings": True}, "llama", ("scale_embeddings",)),
    "untied": ({"scale_embeddings": True, "tie_embeddings": False}, "llama", ("scale_embeddings",)),
    "mixtral": (
        {"scale_embeddings": True, "ffn": moe(router__renormalize=True, router__scale=0.25)},
        "mixtral", ("scale_embeddings", "ffn.router.scale"),
    ),
    "jittered": (
        {"ffn": {"type": "jittered", "jitter": 0.1, "ffn": moe(router__renormalize=True, router__scale=1.7)}},
        "mixtral", ("ffn.router.scale",),
    ),
    "default": (
        {"scale_embeddings": True, "ffn": moe(router__scale=2.5)},
        "qwen2_moe",
        ("scale_embeddings", "tie_embeddings", "ffn.router.scale", "ffn.shared_expert", "attention.bias"),
    ),
    "shared": (
        {"ffn": moe(shared_expert=SHARED, combine__type="sigmoid_gate", router__scale=4.0)},
        "qwen2_moe", ("ffn.router.scale", "tie_embeddings", "attention.bias"),
    ),
    "olmoe": (
        {
            "attention": {"num_heads": 4, "norm_qk": "all"},
            "norm": {"type": "rms_norm", "eps": 1e-5},
            "ffn": moe(router__scale=0.3),
        },
        "olmoe", ("ffn.router.scale", "tie_embeddings"),
    ),
    "deepseek": (
        {**OURS["latent"][0], "scale_embeddings": True},
        "deepseek_v3", ("scale_embeddings", "tie_embeddings"),
    ),
    "deepseek without a correction bias": (
        {"attention": LATENT, "ffn": moe(router={**SIGMOID, "correction_bias": False})},
        "deepseek_v3", ("ffn.router.correction_bias", "ffn.shared_expert", "tie_embeddings"),
    ),
    "dots1 without a correction bias": (
        {
            "attention": {**ATTENTION, "norm_qk": "head"},
            "ffn": {**ROUTED_BY_SIGMOID, "router": {**SIGMOID, "correction_bias": False}},
        },
        "dots1", ("ffn.router.correction_bias", "tie_embeddings"),
    ),
    "glm without a shared expert": (
        {"attention": {**ATTENTION, "bias": "qkv"}, "ffn": moe(router={**SIGMOID, "correction_bias": False})},
        "glm4_moe", ("ffn.router.correction_bias", "ffn.shared_expert", "tie_embeddings"),
    ),
    "gpt-oss without biases": (
        {
            "attention": {**SINKS, "bias": "qkv"},
            "ffn": {
                **CLAMPED,
                "router": {"type": "top_k", "renormalize": True},
                "experts": {"type": "clamped_swiglu", "d_ff": 24},
            },
        },
        "gpt_oss", ("attention.bias", "ffn.router.bias", "ffn.experts.bias", "tie_embeddings"),
    ),
    "head norms with biases": (
        {"attention": {**ATTENTION, "norm_qk": "head", "bias": "qkv"}}, "qwen3", ("attention.bias",),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "architecture", "folded"), FOLDED.values(), ids=FOLDED)
def test_options_that_an_architecture_lacks_are_folded_into_the_weights(
    options: dict[str, Any], architecture: str, folded: tuple[str, ...], tmp_path: Path
) -> None:
    decoder = decoder_of(**options)

    export = export_transformers(decoder, tmp_path / "theirs")

    assert export.family.model_type == architecture
    rewritten = {
        note.split(":")[0]
        for note in export.notes
        if not re.search(" has | only (in|with) |require", note)
    }
    assert rewritten == set(folded), export.notes
    ours = logits(decoder)
    scale = ours.abs().max()
    for model in (read(tmp_path / "theirs"), load_transformers(tmp_path / "theirs")):
        torch.testing.assert_close(logits(model) / scale, ours / scale, atol=1e-5, rtol=0)


def test_llama_cpp_can_compute_the_shared_expert_that_we_lack(tmp_path: Path) -> None:
    """The gate of llama.cpp is silu(x) / x, so x must not be zero; the output is zero."""
    export_transformers(decoder_of(ffn=moe()), tmp_path / "theirs")
    weights = load_file(tmp_path / "theirs/model.safetensors")
    gate = weights["model.layers.0.mlp.shared_expert_gate.weight"]
    down = weights["model.layers.0.mlp.shared_expert.down_proj.weight"]
    assert (gate == 1).all()
    assert (down == 0).all()


@pytest.mark.parametrize("model", ["default", "all normalised"])
def test_tied_embeddings_are_separate_where_llama_cpp_needs_both(
    model: str, tmp_path: Path
) -> None:
    decoder = decoder_of(**OURS[model][0])
    export_transformers(decoder, tmp_path / "theirs")
    weights = load_file(tmp_path / "theirs/model.safetensors")
    assert torch.equal(weights["lm_head.weight"], decoder.embedding.weight)
    assert read(tmp_path / "theirs").config.tie_word_embeddings is False


SIGMOID_GATE = {"shared_expert": SHARED, "combine__type": "sigmoid_gate"}
HEAD_NORMS = {**ATTENTION, "norm_qk": "head"}
LLAMA_CPP: dict[str, tuple[dict[str, Any], str]] = {
    "gate": (
        {"ffn": "geglu"},
        "llama.cpp requires silu gates (swiglu), as mlx-lm does, not geglu, in llama",
    ),
    "not renormalised": (
        {"attention": HEAD_NORMS, "ffn": moe()},
        "llama.cpp requires ffn.router.renormalize: true in qwen3_moe",
    ),
    "renormalised": (
        {"ffn": moe(router__renormalize=True, **SIGMOID_GATE)},
        "llama.cpp and mlx-lm require ffn.router.renormalize: false in qwen2_moe",
    ),
    "a dense layer": (
        {"attention": HEAD_NORMS, "ffn": moe(router__renormalize=True), "ffn_at": {"1": "swiglu"}},
        "llama.cpp requires sparse layers only, not 1 dense (model.ffn_at), in qwen3_moe",
    ),
    "a dense layer, and renormalised": (
        {"ffn": moe(router__renormalize=True), "ffn_at": {"0": "swiglu"}},
        "llama.cpp and mlx-lm require sparse layers only, not 1 dense (model.ffn_at), in qwen2_moe",
    ),
    "biases": (
        {"attention": {**HEAD_NORMS, "bias": True}},
        "llama.cpp requires attention.bias: false in qwen3",
    ),
    "heads": (
        {"attention": {**ATTENTION, "head_dim": 12}, "ffn": moe()},
        "llama.cpp and mlx-lm require heads of width d_model / num_heads in qwen2_moe",
    ),
    "groups": (
        OURS["all normalised"][0],
        "llama.cpp requires attention.num_kv_heads equal to num_heads in olmoe",
    ),
    "window": (
        {"attention": {**ATTENTION, "window": 7}},
        "llama.cpp requires attention.window: null in mistral",
    ),
    "llama3": (
        {"attention": HEAD_NORMS, "positions": {"type": "rope", "scaling": LLAMA3}},
        "llama.cpp requires positions.scaling other than llama3 in qwen3",
    ),
    "yarn": (
        {"positions": {"type": "rope", "scaling": {**YARN, "beta_fast": 8}}},
        "llama.cpp requires positions.scaling with beta_fast: 32, beta_slow: 1 and truncate: true in llama",
    ),
    "biases of dots1": (
        {"attention": {"num_heads": 4, "norm_qk": "head", "bias": True}, "ffn": ROUTED_BY_SIGMOID},
        "llama.cpp requires attention.bias: false in dots1",
    ),
    "gate of gpt-oss": (
        {"attention": SINKS, "ffn": CLAMPED},
        "llama.cpp requires ffn.experts.alpha: 1.702 and limit: 7 in gpt_oss",
    ),
    "latent, linear": (
        {
            "attention": LATENT,
            "ffn": ROUTED_BY_SIGMOID,
            "positions": {"type": "rope", "scaling": {"type": "linear", "factor": 4.0}},
        },
        "llama.cpp requires positions.scaling other than linear in deepseek_v3",
    ),
    "latent, yarn": (
        {
            "attention": LATENT,
            "ffn": ROUTED_BY_SIGMOID,
            "positions": {"type": "rope", "scaling": YARN},
        },
        "llama.cpp requires positions.scaling.attention_factor: 1 in deepseek_v3",
    ),
    "latent, 27 layers": (
        {
            "attention": {**LATENT, "latent": {**LATENT["latent"], "query_rank": 4}},
            "num_layers": 27,
            "ffn": ROUTED_BY_SIGMOID,
        },
        "llama.cpp requires attention.latent.query_rank: null with 26 or 27 layers in deepseek_v3",
    ),
    "groups of dots1": (
        {"attention": HEAD_NORMS, "ffn": ROUTED_BY_SIGMOID},
        "llama.cpp requires attention.num_kv_heads equal to num_heads in dots1",
    ),
    "eps": (
        {"attention": {"num_heads": 4, "norm_qk": "all"}, "ffn": moe()},
        "the converter of llama.cpp sets norm.eps to 1e-05; convert to a .gguf file here keeps 1e-06",
    ),
}


@pytest.mark.parametrize(("options", "note"), LLAMA_CPP.values(), ids=LLAMA_CPP)
def test_limits_of_llama_cpp_are_noted(options: dict[str, Any], note: str) -> None:
    assert choose_architecture(decoder_of(**options)).notes[-1] == note


@pytest.mark.parametrize(
    ("options", "ignored"),
    [
        ({"attention": {**ATTENTION, "window": 7}}, "attention.window in mistral"),
        (
            {
                "ffn": moe(router__renormalize=True),
                "positions": {"type": "rope", "scaling": LLAMA3},
            },
            "positions.scaling in mixtral",
        ),
        (
            {"positions": {"type": "rope", "scaling": {**YARN, "attention_factor": 1.5}}},
            "positions.scaling.attention_factor in llama",
        ),
    ],
)
def test_options_that_mlx_ignores_are_noted(options: dict[str, Any], ignored: str) -> None:
    assert f"mlx-lm ignores {ignored}" in choose_architecture(decoder_of(**options)).notes


def test_experts_in_one_tensor_are_noted_and_not_packed() -> None:
    experts = {"type": "fake_quantized", "format": "fp8", "experts": CLAMPED["experts"]}
    decoder = decoder_of(attention=SINKS, ffn={**CLAMPED, "experts": experts})
    notes = choose_architecture(decoder).notes
    assert "mlx-lm reads gpt_oss only with quantised experts" in notes
    with pytest.raises(ConfigError) as caught:
        choose_architecture(decoder, packed=True)
    assert str(caught.value) == (
        "gpt_oss has all experts in one tensor, so they cannot be packed as fp8; convert without --packed"
    )


# -- what is rejected

NO_EQUAL = "has no counterpart in transformers"
REJECTED: dict[str, tuple[dict[str, Any], str]] = {
    "router bias": (
        {"ffn": moe(router__renormalize=True, router__bias=True)},
        f"ffn.router.bias (true) {NO_EQUAL}: mixtral, the nearest architecture, has false; train with that "
        "value",
    ),
    "capacity": ({"ffn": moe(capacity__eval_factor=2.0)}, f"ffn.capacity.eval_factor (2.0) {NO_EQUAL}"),
    "router": ({"ffn": moe(router={"type": "hash"})}, f'ffn.router.type ("hash") {NO_EQUAL}'),
    "plain experts": ({"ffn": moe(experts={"type": "mlp"})}, f'ffn.experts.type ("mlp") {NO_EQUAL}'),
    "sum": ({"ffn": moe(shared_expert=SHARED)}, f'ffn.combine.type ("sum") {NO_EQUAL}: qwen2_moe'),
    "shared width": (
        {"attention": LATENT, "ffn": moe(router=SIGMOID, shared_expert=SHARED)},
        f"ffn.shared_expert.d_ff (20) {NO_EQUAL}: deepseek_v3, the nearest architecture, has 24",
    ),
    "fraction": (
        {"positions": {"type": "rope", "fraction": 0.5}}, f"positions.fraction (0.5) {NO_EQUAL}: llama"
    ),
    "scores": (
        {"positions": {"type": "rope", "scaling": {**YARN, "score_mscale": 1.0}}},
        f"positions.scaling.score_mscale (1.0) {NO_EQUAL}: llama, the nearest architecture, has 0.0",
    ),
    "windows of a mixture": (
        {
            "attention": {**ATTENTION, "norm_qk": "head", "window": 7, "window_at": "0,2"},
            "ffn": moe(router__renormalize=True),
        },
        f"attention.window_at ([0, 2]) {NO_EQUAL}: qwen3_moe, the nearest architecture, has [0, 1, 2]",
    ),
    "latent window": (
        {"attention": {**LATENT, "window": 7}, "ffn": ROUTED_BY_SIGMOID},
        f"attention.window (7) {NO_EQUAL}: deepseek_v3, the nearest architecture, has null",
    ),
    "sinks of other experts": (
        {"attention": {**ATTENTION, "sinks": True}, "ffn": moe(router__renormalize=True)},
        f"attention.sinks (true) {NO_EQUAL}: mixtral, the nearest architecture, has false",
    ),
    "plain": ({"ffn": "dense"}, f'ffn.type ("dense") {NO_EQUAL}: llama'),
    "post-norm": ({"norm_placement": "post"}, f'norm_placement ("post") {NO_EQUAL}: llama'),
    "encoder": ({"causal": False}, f"causal (false) {NO_EQUAL}"),
    "two blocks": (
        {"ffn": moe(), "ffn_at": {"2": moe(num_experts=3)}},
        "ffn.num_experts is 5 in layer 0 and 3 in layer 2, but transformers has one block for all sparse "
        "layers; train with one value",
    ),
    "dense above": (
        {"attention": LATENT, "ffn": moe(router=SIGMOID), "ffn_at": {"2": {"type": "swiglu", "d_ff": 24}}},
        f"ffn_at (sparse layers) ([0, 1]) {NO_EQUAL}: deepseek_v3",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("options", "message"), REJECTED.values(), ids=REJECTED)
def test_options_without_an_equivalent_are_rejected_before_writing(
    options: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError) as caught:
        export_transformers(decoder_of(**options), tmp_path / "theirs")
    assert str(caught.value).startswith(f"model.{message}")
    assert list(tmp_path.iterdir()) == []


def test_an_equal_that_would_replace_the_tokenizer_is_not_the_nearest() -> None:
    # qwen2 has these biases and windows, but transformers gives it another tokenizer.
    decoder = decoder_of(attention={**ATTENTION, "bias": "qkv", "window": 7}, ffn="swiglu")
    assert choose_architecture(decoder).family.model_type == "qwen2"
    with pytest.raises(ConfigError) as caught:
        choose_architecture(decoder, has_tokenizer=True)
    assert str(caught.value).startswith(f'model.attention.bias ("qkv") {NO_EQUAL}: mistral')


def test_existing_folders_are_not_overwritten(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoder = decoder_of()
    (tmp_path / "empty").mkdir()
    export_transformers(decoder, tmp_path / "empty")
    with pytest.raises(ConfigError, match=r"empty' already exists; give a new folder"):
        export_transformers(decoder, tmp_path / "empty")

    full = Mock(side_effect=OSError(28, "No space left on device"))
    monkeypatch.setattr("moe_ffn.hf.to_transformers.save_tensors", full)
    with pytest.raises(ConfigError, match=r"cannot be written \(No space left on device\)"):
        export_transformers(decoder, tmp_path / "other")
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]


# -- for llama.cpp; `test_clients.py` runs the files there

CATS = b"the cat sat on the mat, the cat sat" * 9


def test_weights_are_in_the_dtype_of_the_model_and_vectors_and_routers_in_float32(
    tmp_path: Path,
) -> None:
    gguf = pytest.importorskip("gguf")
    decoder = decoder_of(ffn=moe(router__renormalize=True)).bfloat16()

    export_gguf(decoder, tmp_path / "new/model.gguf", train_bpe([CATS], 512))

    reader = gguf.GGUFReader(tmp_path / "new/model.gguf")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    kinds = {name: tensor.tensor_type.name for name, tensor in tensors.items()}
    assert {name for name, kind in kinds.items() if kind == "F32"} == {
        "output_norm.weight",
        *(
            f"blk.{i}.{name}.weight"
            for i in range(3)
            for name in ("attn_norm", "ffn_norm", "ffn_gate_inp")
        ),
    }
    assert set(kinds.values()) == {"F32", "BF16"}
    down = torch.from_numpy(tensors["blk.2.ffn_down_exps.weight"].data.copy()).view(torch.bfloat16)
    assert torch.equal(down, decoder.state_dict()["layers.2.ffn.experts.down"])


def test_a_model_that_llama_cpp_computes_differently_is_rejected(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    options, note = LLAMA_CPP["not renormalised"]
    with pytest.raises(ConfigError) as caught:
        export_gguf(decoder_of(**options), tmp_path / "model.gguf", BytesTokenizer())
    assert str(caught.value) == f"{note}; train with that"
    assert list(tmp_path.iterdir()) == []


def test_a_tokenizer_with_another_splitting_rule_is_not_written(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    definition = json.loads(json.dumps(train_bpe([CATS], 512).to_hugging_face()))
    definition["pre_tokenizer"]["use_regex"] = False
    digits = {"type": "Digits", "individual_digits": True}
    both = {"type": "Sequence", "pretokenizers": [digits, definition["pre_tokenizer"]]}
    for splitting in (definition["pre_tokenizer"], both):
        tokenizer = BPETokenizer({**definition, "pre_tokenizer": splitting})
        with pytest.raises(
            ConfigError, match="BPE that splits text as GPT-2 does; this tokenizer has"
        ):
            export_gguf(decoder_of(), tmp_path / "model.gguf", tokenizer)


def test_a_missing_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match=r"^a \.gguf file needs gguf: pip install gguf$"):
        export_gguf(decoder_of(), tmp_path / "model.gguf", BytesTokenizer())
