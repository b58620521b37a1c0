"""`moe-ffn trace` of a model folder of moe_ffn or transformers, and the folders that it rejects."""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import moe_ffn
from moe_ffn.data.tokenizer import BytesConfig
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.model.generate import generate
from moe_ffn.report.trace import trace_text
from moe_ffn.runs.reader import load_model
from tests.helpers import theirs
from tests.helpers.tiny_runs import cli, trained

trace = cli("trace", columns=100)
FEW: dict[str, Any] = {"max_position_embeddings": 16, "num_experts_per_tok": 2}


@pytest.fixture(scope="module")
def sparse(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Layers 0 and 2 with six experts, layer 1 with none."""
    return theirs.save_with_bytes(
        "qwen3_moe-renormalised", tmp_path_factory.mktemp("models"), **FEW
    )


def test_a_folder_of_transformers_is_traced_as_a_run_is(sparse: Path, tmp_path: Path) -> None:
    code, out, err = trace(sparse, "--text", "a é", "--html", tmp_path / "page.html")

    assert (code, err) == (0, "")
    assert "Nothing is routed: dense (layer 1)." in out
    rows = re.findall(r"^(\d)  (\S+) +(\d) \.\d\d +(\d) \.\d\d", out, re.MULTILINE)
    assert [token for _, token, *_ in rows] == ["a", "␣", r"\xc3", r"\xa9"]
    model = AutoModelForCausalLM.from_pretrained(sparse)
    ids = list("a é".encode())
    with torch.no_grad():
        hidden: list[torch.Tensor] = []
        gate = model.model.layers[0].mlp.gate
        gate.register_forward_hook(lambda m, a, output: hidden.append(output[2]))
        logits = model(input_ids=torch.tensor([ids])).logits[0]
    assert [[int(first), int(second)] for *_, first, second in rows] == hidden[0].tolist()
    best = bytes([int(logits[0].argmax())])
    assert best.decode("latin-1") in out or f"\\x{best.hex()}" in out
    assert "layer 2" in (tmp_path / "page.html").read_text()


def test_a_model_folder_of_ours_is_traced(tmp_path: Path) -> None:
    config = DecoderConfig.model_validate({"num_layers": 2, "d_model": 16, "ffn": "moe"})
    decoder = config.build(257, 8)
    moe_ffn.save_pretrained(decoder, tmp_path / "ours", BytesConfig().build(()))

    code, out, err = trace(tmp_path / "ours", "--text", "def", "--layers", "1")

    assert (code, err) == (0, "")
    assert "layer 1" in out
    assert "layer 0" not in out


def truncated(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def with_config(**options: Any) -> Callable[[Path], Any]:
    return lambda folder: theirs.change(folder, **options)


def pickled(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def dense(folder: Path) -> None:
    theirs.make("llama", {"vocab_size": 257}).save_pretrained(folder)


BAD: dict[str, tuple[Callable[[Path], Any], str]] = {
    "pickle": (
        pickled,
        "'pytorch_model.bin' is a pickle, which may run code; give weights as safetensors",
    ),
    "unknown": (with_config(model_type="mixtrol"), "`mixtrol` but Transformers does not recognize"),
    "truncated": (
        truncated,
        "model.safetensors' cannot be read (Error while deserializing header: ",
    ),
    "deeper": (with_config(num_hidden_layers=4), "has no weight 'model.layers.3"),
    "more experts per token than experts": (
        with_config(num_experts_per_tok=9),
        "config.json': num_experts_per_tok (9) must not exceed the number of experts (6); lower it",
    ),
    "dense": (dense, "LlamaForCausalLM can be watched: it has none of our blocks, and no experts"),
}


@pytest.mark.parametrize(("spoil", "sentence"), BAD.values(), ids=BAD)
def test_an_untraceable_folder_is_reported_in_one_sentence(
    spoil: Callable[[Path], Any], sentence: str, sparse: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "spoilt"
    shutil.copytree(sparse, folder)
    spoil(folder)

    code, out, err = trace(folder, "--text", "def", "--html", tmp_path / "page.html")

    assert (code, out) == (2, "")
    assert sentence in err
    assert err.count("\n") == 1
    assert not (tmp_path / "page.html").exists()


def test_text_that_is_not_utf8_is_rejected(sparse: Path) -> None:
    code, _, err = trace(sparse, "--text", "a\udcff")
    assert (code, err.strip()) == (
        2,
        "error: --text: is not UTF-8, which the tokenizers of transformers need",
    )


def test_transformers_may_be_missing(sparse: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    code, _, err = trace(sparse, "--text", "def")
    assert (code, err.strip()) == (
        2,
        "error: transformers 5 or newer is not installed: pip install transformers",
    )


# -- `moe-ffn generate`: text as it is written, its speed, and where its tokens went


LENGTH = 16  # data.seq_len of the tiny runs
generate_text = cli("generate")


def rows_of(shown: str) -> list[str]:
    """The rows of the tokens; a line of the legend begins with a pair."""
    return [line for line in shown.splitlines() if re.match(r" *\d+  ", line)]


def test_the_text_is_that_of_generate_and_its_speed_is_on_stderr() -> None:
    done = generate_text(trained(), "--prompt", "the ", "--num-tokens", 30, "--temperature", 0)
    run = load_model(trained())
    ids = generate(run.decoder, torch.tensor(list(b"the ")), 30, temperature=0)
    assert done.code == 0
    assert done.stdout == f"the {run.tokenizer.decode(ids.tolist())}\n"
    assert re.fullmatch(r"30 tokens in [\d.]+ s, [\d.]+ tokens/s", done.own_lines[-1])


def test_it_ends_before_a_stop_string() -> None:
    argv = (trained(), "--prompt", "the ", "--num-tokens", 12, "--top-p", 0.9)
    text = generate_text(*argv).stdout.removesuffix("\n").removeprefix("the ")
    stop = text[3:5]
    stopped = generate_text(*argv, "--stop", "\x00\x00", "--stop", stop)
    assert stopped.stdout == f"the {text[: text.index(stop)]}\n"


@pytest.mark.parametrize("length", [6, 12], ids=["in the context", "beyond the context"])
def test_the_trace_has_the_experts_of_every_token(length: int) -> None:
    argv = (trained(), "--prompt", "a mat ", "--num-tokens", length, "--temperature", 0)
    done = generate_text(*argv, "--trace")

    text, shown = done.stdout.split("\n\n", 1)
    rows = rows_of(shown)
    written = text.encode()
    ends = range(
        LENGTH + 1, 7 + length
    )  # beyond the context, each is the last of what the model saw
    run = load_model(trained())
    trace = partial(trace_text, run.folder, run.decoder, run.tokenizer)
    tokens = [
        *trace(written[:LENGTH]).tokens,
        *(trace(written[end - LENGTH : end]).tokens[-1] for end in ends),
    ]
    assert len(rows) == 6 + length
    for row, token in zip(rows, tokens, strict=True):
        visits = [visit for visit in token.visits.values() if visit is not None]
        experts = [str(choice.expert) for visit in visits for choice in visit.choices]
        assert re.findall(r"(\d) [.\d]+ ", row.split(token.token, 1)[1])[: len(experts)] == experts


def test_a_long_prompt_of_a_config_is_rejected_before_there_is_a_run(
    run_train: Any, tmp_path: Path
) -> None:
    done = run_train(tmp_path, "--sample.prompt", "a" * 17)
    assert done.code == 2
    assert "error: sample.prompt: has 17 tokens, but the model takes sequences of 16" in done.stderr
    assert not (tmp_path / "runs").exists()
