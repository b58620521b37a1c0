"""Exported models have our tokens and our logits in llama.cpp, mlx-lm and litgpt.

`make clients` installs these programs and prints the table of `docs/howto/exchange.md`.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import Decoder
from moe_ffn.data.tokenizer import BytesTokenizer, Tokenizer, train_bpe
from moe_ffn.weights import export_gguf, export_transformers
from tests.weights.test_to_transformers import (
    ATTENTION,
    HEAD_NORMS,
    LATENT,
    LLAMA3,
    ROUTED_BY_SIGMOID,
    SHARED,
    SIGMOID,
    SIGMOID_GATE,
    TEXT,
    YARN,
    decoder_of,
    moe,
)

pytestmark = pytest.mark.slow

Answer = tuple[list[int], Tensor]
"""The tokens of `TEXT`, and the logits (S, V) of the first `LENGTH` of our tokens."""

LENGTH = 40


def in_llama_cpp(decoder: Decoder, tokenizer: Tokenizer, folder: Path) -> Answer:
    llama_cpp = pytest.importorskip("llama_cpp")
    export_gguf(decoder, folder / "model.gguf", tokenizer)
    kinds = {"type_k": llama_cpp.GGML_TYPE_F32, "type_v": llama_cpp.GGML_TYPE_F32}
    llm = llama_cpp.Llama(
        str(folder / "model.gguf"), n_ctx=48, logits_all=True, verbose=False, **kinds
    )
    llm.eval(tokenizer.encode(TEXT)[:LENGTH].tolist())
    return llm.tokenize(TEXT.encode(), add_bos=False), torch.from_numpy(llm.scores[:LENGTH].copy())


def in_mlx_lm(decoder: Decoder, tokenizer: Tokenizer, folder: Path) -> Answer:
    mlx_lm, mx = pytest.importorskip("mlx_lm"), pytest.importorskip("mlx.core")
    export_transformers(decoder, folder / "theirs", tokenizer)
    model, theirs = mlx_lm.load(str(folder / "theirs"))[:2]
    ids_BS = mx.array(tokenizer.encode(TEXT)[None, :LENGTH].tolist())
    return theirs.encode(TEXT), torch.tensor(model(ids_BS)[0].tolist())


def in_litgpt(decoder: Decoder, tokenizer: Tokenizer, folder: Path) -> Answer:
    litgpt = pytest.importorskip("litgpt")
    converter = pytest.importorskip("litgpt.scripts.convert_hf_checkpoint")
    export = export_transformers(decoder, folder / "theirs", tokenizer)
    name = f"{export.family.model_type.replace('_', '-')}-exported"  # the beginning selects a converter
    litgpt.config.name_to_config[name] = litgpt_config(name, export.options)
    converter.convert_hf_checkpoint(folder / "theirs", model_name=name)
    model = litgpt.GPT(litgpt.Config.from_file(folder / "theirs/model_config.yaml"))
    model.load_state_dict(torch.load(folder / "theirs/lit_model.pth"))
    with torch.no_grad():
        logits_SV = model(tokenizer.encode(TEXT)[None, :LENGTH])[0]
    theirs = litgpt.Tokenizer(folder / "theirs")
    return theirs.encode(TEXT, bos=False, eos=False).tolist(), logits_SV


def litgpt_config(name: str, theirs: Any) -> dict[str, Any]:
    """litgpt reads no `config.json`; its users write the options of a model down."""
    experts = theirs.get("num_local_experts", theirs.get("num_experts", 0))
    return {
        "name": name,
        "hf_config": {"org": "exported", "name": name},
        "block_size": theirs["max_position_embeddings"],
        "padded_vocab_size": theirs["vocab_size"],
        "n_layer": theirs["num_hidden_layers"],
        "n_head": theirs["num_attention_heads"],
        "n_query_groups": theirs["num_key_value_heads"],
        "head_size": theirs["head_dim"],
        "n_embd": theirs["hidden_size"],
        "intermediate_size": theirs["intermediate_size"],
        "moe_intermediate_size": theirs.get("moe_intermediate_size"),
        "n_expert": experts,
        "n_expert_per_token": theirs.get("num_experts_per_tok", 0),
        "mlp_class_name": "LLaMAMoE" if experts else "LLaMAMLP",
        "norm_class_name": "RMSNorm",
        "norm_eps": theirs["rms_norm_eps"],
        "norm_qk": name.startswith("qwen3"),
        "rope_base": theirs["rope_theta"],
        "rotary_percentage": 1.0,
        "parallel_residual": False,
        "bias": False,
    }


CLIENTS = {
    "llama_cpp_python": in_llama_cpp,
    "mlx_lm": in_mlx_lm,
    "litgpt": in_litgpt,
}
"""PyPI package -> its answer."""
ALL, NO_LITGPT = tuple(CLIENTS), ("llama_cpp_python", "mlx_lm")
GGUF, MLX = ("llama_cpp_python",), ("mlx_lm",)

RENORMALISED = moe(router__renormalize=True)
FIRST_DENSE = {":1": {"type": "swiglu", "d_ff": 40}}
NORMED = {"num_heads": 4, "norm_qk": "head"}
GROUPS = {
    **ROUTED_BY_SIGMOID,
    "num_experts": 6,
    "router": {**SIGMOID, "groups": {"num_groups": 3, "keep": 2}},
}
GLM = {"positions": {"type": "rope", "fraction": 0.5}, "attention": {**ATTENTION, "bias": "qkv"}}


SHARPER = {**YARN, "score_mscale": 1.0, "attention_factor": 1.0}


def scaled(**scaling: Any) -> dict[str, Any]:
    return {"positions": {"type": "rope", "scaling": scaling}}


OLMOE = {"attention": {"num_heads": 4, "norm_qk": "all"}, "norm": {"type": "rms_norm", "eps": 1e-5}}
MODELS: dict[str, tuple[dict[str, Any], tuple[str, ...]]] = {
    "Llama": ({}, ALL),
    "Llama, for biases as in Qwen2": ({"attention": {**ATTENTION, "bias": "qkv"}}, NO_LITGPT),
    "Qwen3": ({"attention": HEAD_NORMS}, ALL),
    "Mixtral": ({"ffn": RENORMALISED}, ALL),
    "Mixtral, scales folded": (
        {"scale_embeddings": True, "ffn": moe(router__renormalize=True, router__scale=0.25)}, ALL
    ),
    "Qwen3-MoE": ({"attention": HEAD_NORMS, "ffn": RENORMALISED}, ALL),
    "Qwen3-MoE, not renormalised": ({"attention": HEAD_NORMS, "ffn": moe()}, MLX),
    "Qwen3-MoE, a dense layer": (
        {"attention": HEAD_NORMS, "ffn": RENORMALISED, "ffn_at": {"1": "swiglu"}}, MLX
    ),
    "Qwen2-MoE, shared expert added": ({"ffn": moe()}, NO_LITGPT),
    "Qwen2-MoE": ({"ffn": moe(**SIGMOID_GATE)}, NO_LITGPT),
    "OLMoE": ({**OLMOE, "ffn": moe()}, NO_LITGPT),
    "OLMoE, renormalised": ({**OLMOE, "ffn": RENORMALISED}, MLX),
    "DeepSeek-V3, no groups": (
        {"attention": LATENT, "ffn": moe(router=SIGMOID, shared_expert={**SHARED, "d_ff": 24})}, MLX
    ),
    "dots1": ({"attention": NORMED, "ffn": ROUTED_BY_SIGMOID, "ffn_at": FIRST_DENSE}, NO_LITGPT),
    "dots1, groups": ({"attention": NORMED, "ffn": GROUPS}, GGUF),
    "GLM-4.5": ({**GLM, "ffn": ROUTED_BY_SIGMOID, "ffn_at": FIRST_DENSE}, NO_LITGPT),
    "GLM-4.5, groups, heads normalised": (
        {**GLM, "attention": HEAD_NORMS, "ffn": GROUPS}, GGUF
    ),
    "Llama, linear positions": (scaled(type="linear", factor=4.0), NO_LITGPT),
    "Llama, positions of Llama 3.1": (scaled(**LLAMA3), NO_LITGPT),
    "Llama, YaRN": (scaled(**YARN), NO_LITGPT),
    "Qwen3, YaRN": ({"attention": HEAD_NORMS, **scaled(**YARN)}, NO_LITGPT),
    "Mixtral, positions of Llama 3.1": ({"ffn": RENORMALISED, **scaled(**LLAMA3)}, GGUF),
    "Qwen3-MoE, YaRN with a factor": (
        {"attention": HEAD_NORMS, "ffn": RENORMALISED, **scaled(**YARN, attention_factor=1.5)}, GGUF
    ),
    "GLM-4.5, YaRN": (
        {**GLM, "positions": {**GLM["positions"], "scaling": YARN}, "ffn": ROUTED_BY_SIGMOID}, GGUF,
    ),
    "DeepSeek-V3, YaRN": (
        {"attention": LATENT, "ffn": ROUTED_BY_SIGMOID, **scaled(**SHARPER)}, MLX,
    ),
}  # fmt: skip
"""Options of a model, and the packages that can compute it."""
CASES = [(client, model) for model, (_, clients) in MODELS.items() for client in clients]


@pytest.fixture(scope="module")
def largest(request: pytest.FixtureRequest) -> Iterator[dict[str, dict[str, float]]]:
    """Model -> package -> the largest difference of a logit; printed as a table at the end."""
    found: dict[str, dict[str, float]] = {}
    yield found
    if not found:
        return
    packages = [client for client in CLIENTS if any(client in row for row in found.values())]
    versions = [f"{name.replace('_', '-')} {importlib.metadata.version(name)}" for name in packages]
    rows = [["model", *versions], ["---"] * (len(packages) + 1)]
    for model, row in found.items():
        rows.append([model, *(f"{row[name]:.0e}" if name in row else "" for name in packages)])
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print("", *(f"| {' | '.join(cells)} |" for cells in rows), sep="\n")


@pytest.mark.parametrize("kind", ["bytes", "bpe"])
@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(("client", "model"), CASES)
def test_tokens_and_logits_are_ours(
    client: str,
    model: str,
    tied: bool,
    kind: str,
    largest: dict[str, dict[str, float]],
    tmp_path: Path,
) -> None:
    tokenizer = BytesTokenizer() if kind == "bytes" else train_bpe([TEXT.encode()] * 3, 600)
    options = {**MODELS[model][0], "tie_embeddings": tied}
    decoder = decoder_of(vocab_size=tokenizer.vocab_size, **options)

    tokens, logits_SV = CLIENTS[client](decoder, tokenizer, tmp_path)

    ours = tokenizer.encode(TEXT)
    assert tokens == ours.tolist()
    with torch.no_grad():
        expected_SV = decoder(ours[None, :LENGTH]).logits[0]
    assert expected_SV.abs().max() > 1
    difference = float((logits_SV.float() - expected_SV).abs().max())
    row = largest.setdefault(model, {})
    row[client] = max(difference, row.get(client, 0.0))
    assert difference < 1e-4
