"""`convert`: a run or a model folder becomes a transformers folder, and back; the hub's layout is read."""

from __future__ import annotations

import hashlib
import json
import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

import moe_ffn
from moe_ffn import load_pretrained
from moe_ffn.cli.train import parse
from moe_ffn.config.yaml_files import validate
from moe_ffn.data.tokenizer import BytesTokenizer
from moe_ffn.hf.to_transformers import choose_architecture
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import MODEL_FOLDER
from moe_ffn.runs.reader import load_model
from moe_ffn.studies.which import BLOCKS
from moe_ffn.weights.pretrained import TOKENIZER_FILE
from tests.helpers import theirs
from tests.helpers.cases import ROOT
from tests.helpers.theirs import SHARED, logits, make, save
from tests.helpers.tiny_runs import cli, finished_copy, options, run_here, trained

convert = cli("convert")


def test_a_run_becomes_a_folder_of_transformers(tmp_path: Path) -> None:
    run = trained()

    done = convert(run, tmp_path / "theirs")

    assert (done.code, done.stderr) == (0, "")
    read, layers, tokenizer, written, *_ = done.stdout.splitlines()
    saved = load_model(run)
    count = sum(p.numel() for p in saved.decoder.parameters())
    assert read == f"read: '{run}', moe_ffn, {count:,} parameters in float32"
    assert layers.startswith("  2 layers of width 16: moe, 8 experts (swiglu), top_k k=2")
    assert tokenizer == f"  a tokenizer of {saved.tokenizer.vocab_size:,} tokens"
    assert written == f"written: '{tmp_path}/theirs', Qwen2MoeForCausalLM of transformers"
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    ids_BS = torch.arange(16)[None]
    with torch.no_grad():
        expected = saved.decoder(ids_BS).logits
        torch.testing.assert_close(theirs(ids_BS).logits, expected, atol=1e-4, rtol=0)
    text = "the cat sat"
    encoded = AutoTokenizer.from_pretrained(tmp_path / "theirs").encode(text)
    assert encoded == saved.tokenizer.encode(text).tolist()


BLOCKS_WITH_GATES = {arm: block for arm, block in BLOCKS.items() if arm != "gelu"}
"""Candidates of `which`, without the one that no architecture of transformers has."""
DEFAULTS = {
    "make train": TrainConfig(),
    **{
        name: parse(["--config", str(ROOT / f"configs/{name}.yaml")])
        for name in ("moe", "small", "demo", "adamw", "swiglu", "llama_style", "mixtral_style")
    },
    **{
        f"which, {arm}": validate(TrainConfig, {"model": {"scale_embeddings": True, "ffn": block}})
        for arm, block in BLOCKS_WITH_GATES.items()
    },
}


@pytest.mark.parametrize("config", DEFAULTS.values(), ids=DEFAULTS)
def test_default_models_go_to_transformers_and_llama_cpp(config: TrainConfig) -> None:
    export = choose_architecture(config.model.build_empty(257, 48), has_tokenizer=True)
    assert not export.family.llama_cpp.problem(export.ours)


def test_a_transformers_folder_converts_to_our_format_and_back(tmp_path: Path) -> None:
    theirs = save("qwen3_moe-renormalised", tmp_path / "theirs")

    done = convert(tmp_path / "theirs", tmp_path / "ours")

    assert (done.code, done.stderr) == (0, "")
    read, layers, without, written, cannot = done.stdout.splitlines()
    assert read == (
        f"read: '{tmp_path}/theirs', qwen3_moe of transformers, {theirs.num_parameters():,} parameters "
        "in float32"
    )
    assert layers == "  3 layers of width 32: moe, 6 experts (swiglu), top_k k=3, swiglu"
    assert written == f"written: '{tmp_path}/ours', a model folder of moe_ffn"
    assert without.startswith(f"without a tokenizer: '{tmp_path}/theirs' has no tokenizer.json")
    assert cannot == "no run can start from it: it has 97 tokens, but it has no tokenizer"
    ours = moe_ffn.load_pretrained(tmp_path / "ours")
    torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-4, rtol=0)

    moe_ffn.save_pretrained(ours, tmp_path / "ours", BytesTokenizer())
    done = convert(tmp_path / "ours", tmp_path / "back")
    assert (done.code, done.stderr) == (0, "")
    assert "Qwen3MoeForCausalLM of transformers\n" in done.stdout
    assert AutoTokenizer.from_pretrained(tmp_path / "back").eos_token_id == 256
    assert convert(tmp_path / "back", tmp_path / "again").stdout.count("tokenizer of 257") == 1
    there = convert(tmp_path / "ours", tmp_path / "back")
    assert there.stdout == ""
    assert there.stderr == f"error: '{tmp_path}/back' already exists; give a new folder\n"


def test_a_run_begins_with_what_was_converted_by_the_printed_command(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    make("qwen2_moe", {**SHARED, "vocab_size": 257}).save_pretrained(theirs)
    tokenizer = BytesTokenizer().to_hugging_face()
    (theirs / "tokenizer.json").write_text(json.dumps(tokenizer).replace("<|endoftext|>", "</s>"))
    without = convert(theirs, tmp_path / "ours")
    assert without.stdout.splitlines()[2] == (
        f"without a tokenizer: '{theirs}/tokenizer.json' has no token '<|endoftext|>', which ends "
        "each document; rename the end-of-text token of the file to it everywhere"
    )
    # Another order of the same tokens, so that the default tokenizer is another.
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    (theirs / "tokenizer.json").write_text(json.dumps(tokenizer))

    *_, written, before, command = convert(theirs, tmp_path / "ours").stdout.splitlines()

    assert written.endswith("a model folder of moe_ffn, replacing the model that was there")
    assert before == "start a run from it:"
    words = shlex.split(command.removeprefix("  moe-ffn train "))
    tiny = options(tmp_path, trainer__max_steps="1", sample__num_tokens="0")
    pairs = zip(tiny[::2], tiny[1::2], strict=True)
    besides = [word for pair in pairs if not pair[0].startswith("--model.") for word in pair]
    done = run_here(*words, *besides)
    assert done.code == 0, done.stderr
    assert re.search(r"init_from: (\d+) of \1 tensors come from ", done.stdout)
    assert " (was " not in done.stdout.replace("data.seq_len is 16 (was 48)", "")


ROUNDED = "{type: fake_quantized, format: int8, experts: {type: swiglu, d_ff: 32}}"


def test_rounded_experts_are_packed(tmp_path: Path) -> None:
    sizes = {"model__d_model": "32", "model__ffn__router__renormalize": "true"}
    run = trained(model__ffn__experts=ROUNDED, **sizes)

    done = convert(run, tmp_path / "packed", "--packed")

    assert (done.code, done.stderr) == (0, "")
    assert "  the weights of the experts are packed as int8\n" in done.stdout
    names = load_file(tmp_path / "packed/model.safetensors").keys()
    assert "model.layers.1.block_sparse_moe.experts.7.w3.weight_packed" in names


def test_experts_that_cannot_be_packed_are_rejected(tmp_path: Path) -> None:
    exact = convert(trained(), tmp_path / "packed", "--packed")
    file = convert(trained(), tmp_path / "model.gguf", "--packed")

    assert (exact.code, file.code) == (2, 2)
    assert exact.stderr == (
        "error: --packed stores rounded experts, but layer 0 has none; train with experts: {type: "
        "fake_quantized, format: ...}, or convert without --packed\n"
    )
    assert file.stderr == (
        "error: --packed exports a run or a model folder of moe_ffn to a folder of transformers, not "
        f"'{trained()}' to '{tmp_path}/model.gguf'; leave it out\n"
    )
    assert not (tmp_path / "packed").exists()


def test_a_run_becomes_a_file_of_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("gguf")

    done = convert(trained(), tmp_path / "model.gguf")

    assert (done.code, done.stderr) == (0, "")
    assert f"written: '{tmp_path}/model.gguf', qwen2_moe for llama.cpp\n" in done.stdout
    assert (tmp_path / "model.gguf").read_bytes()[:4] == b"GGUF"
    again = convert(trained(), tmp_path / "model.gguf")
    assert again.stderr == f"error: '{tmp_path}/model.gguf' already exists; give a new file\n"


def test_a_folder_of_transformers_becomes_a_file_of_llama_cpp(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    save("mixtral", tmp_path / "theirs")
    without = convert(tmp_path / "theirs", tmp_path / "model.gguf")
    assert without.stderr.startswith(
        f"error: '{tmp_path}/model.gguf' needs a tokenizer; '{tmp_path}/theirs' has no tokenizer.json"
    )


def to_snapshot(folder: Path) -> Path:
    """Move the files of a model folder into `blobs/`, and link them as the hub's cache does."""
    cache = folder.with_name(f"models--{folder.name}")
    snapshot, blobs = cache / "snapshots" / "0123abc", cache / "blobs"
    for place in (snapshot, blobs):
        place.mkdir(parents=True)
    for path in folder.iterdir():
        blob = blobs / hashlib.sha256(path.name.encode()).hexdigest()
        path.rename(blob)
        (snapshot / path.name).symlink_to(Path("../..") / "blobs" / blob.name)
    return snapshot


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return finished_copy(tmp_path)


def test_a_model_of_ours(run: Path, tmp_path: Path) -> None:
    before = load_pretrained(run / MODEL_FOLDER).state_dict()
    snapshot = to_snapshot(Path(shutil.copytree(run / MODEL_FOLDER, tmp_path / "mine")))

    after = load_pretrained(snapshot).state_dict()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    (tmp_path / "text.txt").write_text("the cat sat on a mat.\n" * 9)
    for program, *argv in (
        ("evaluate", snapshot, "--data", tmp_path / "text.txt"),
        ("convert", snapshot, tmp_path / "converted"),
        ("train", *options(tmp_path / "new", init_from=str(snapshot), trainer__max_steps="1")),
    ):
        done = cli(program)(*argv)
        assert done.code == 0, (program, done.stderr)


def test_a_model_of_transformers(run: Path, tmp_path: Path) -> None:
    family, sizes = theirs.MODELS["mixtral"]
    theirs.make(family, {**sizes, "vocab_size": 257}).save_pretrained(tmp_path / "theirs")
    shutil.copy(run / MODEL_FOLDER / TOKENIZER_FILE, tmp_path / "theirs")
    snapshot = to_snapshot(tmp_path / "theirs")

    for program, *argv in (
        ("convert", snapshot, tmp_path / "converted"),
        ("trace", snapshot, "--text", "a mat"),
    ):
        done = cli(program)(*argv)
        assert done.code == 0, (program, done.stderr)


def test_a_damaged_model_inside_a_run_is_named(run: Path) -> None:
    model = run / MODEL_FOLDER
    (model / "config.json").write_text("{ cut")

    code, _, err = cli("evaluate")(model)

    said = "is not a run: it has no config.yaml; its config.json is damaged; copy it again"
    assert (code, err) == (2, f"error: '{model}' {said}\n")
