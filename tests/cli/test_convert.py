"""`convert`: a run or a model of ours becomes a folder of transformers, and one of theirs one of ours."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import moe_ffn
from moe_ffn.data.tokenizer import BytesTokenizer
from moe_ffn.runs.reader import load_model
from tests.helpers.theirs import change, logits, save
from tests.helpers.tiny_runs import Finished, run_here, trained


def convert(*argv: object) -> Finished:
    return run_here(*map(str, argv), program="experiments.convert")


def test_a_run_becomes_a_folder_of_transformers(tmp_path: Path) -> None:
    run = trained()

    done = convert(run, tmp_path / "theirs")

    assert (done.code, done.stderr) == (0, "")
    read, layers, tokenizer, written, *notes = done.stdout.splitlines()
    saved = load_model(run)
    count = sum(p.numel() for p in saved.decoder.parameters())
    assert read == f"read: '{run}', moe_ffn, {count:,} parameters in float32"
    assert layers.startswith("  2 layers of width 16: moe, 8 experts (swiglu), top_k k=2")
    assert tokenizer == f"  a tokenizer of {saved.tokenizer.vocab_size:,} tokens"
    assert written == f"written: '{tmp_path}/theirs', Qwen2MoeForCausalLM of transformers"
    assert "  mixtral has ffn.router.renormalize: true, this model false" in notes
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "theirs").eval()
    ids_BS = torch.arange(16)[None]
    with torch.no_grad():
        expected = saved.decoder(ids_BS).logits
        torch.testing.assert_close(theirs(ids_BS).logits, expected, atol=1e-4, rtol=0)
    text = "the cat sat"
    encoded = AutoTokenizer.from_pretrained(tmp_path / "theirs").encode(text)
    assert encoded == saved.tokenizer.encode(text.encode()).tolist()


def test_a_folder_of_transformers_becomes_ours_and_theirs_again(tmp_path: Path) -> None:
    theirs = save("qwen3_moe-renormalised", tmp_path / "theirs")

    done = convert(tmp_path / "theirs", tmp_path / "ours")

    assert (done.code, done.stderr) == (0, "")
    read, layers, written, without = done.stdout.splitlines()
    assert read == (
        f"read: '{tmp_path}/theirs', qwen3_moe of transformers, {theirs.num_parameters():,} parameters "
        "in float32"
    )
    assert layers == "  3 layers of width 32: moe, 6 experts (swiglu), top_k k=3, swiglu"
    assert written == f"written: '{tmp_path}/ours', a model folder of moe_ffn"
    assert without.startswith(f"  without a tokenizer: '{tmp_path}/theirs' has no tokenizer.json")
    ours = moe_ffn.load_pretrained(tmp_path / "ours")
    torch.testing.assert_close(logits(ours), logits(theirs), atol=1e-4, rtol=0)

    moe_ffn.save_pretrained(ours, tmp_path / "ours", BytesTokenizer())
    done = convert(tmp_path / "ours", tmp_path / "back")
    assert (done.code, done.stderr) == (0, "")
    assert "Qwen3MoeForCausalLM of transformers\n" in done.stdout
    assert AutoTokenizer.from_pretrained(tmp_path / "back").eos_token_id == 256
    assert convert(tmp_path / "back", tmp_path / "again").stdout.count("tokenizer of 257") == 1


@pytest.mark.parametrize("which", ["theirs", "ours"])
def test_what_is_refused_is_one_line_and_nothing_is_written(which: str, tmp_path: Path) -> None:
    source, target = tmp_path / "source", tmp_path / "target"
    if which == "theirs":
        save("llama", source)
        change(source, model_type="bert")
        said = (
            f"error: '{source}/config.json': model_type 'bert' is none that is read here; known: "
        )
    else:
        config = moe_ffn.DecoderConfig.model_validate({"d_model": 16, "ffn": "dense"})
        moe_ffn.save_pretrained(config.build(257, 16), source)
        said = 'error: model.ffn.type ("dense") has no equal in transformers: '

    done = convert(source, target)

    assert done.code == 2
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
    assert not target.exists()
    assert not list(tmp_path.glob(".*"))


def test_a_source_that_is_not_there(tmp_path: Path) -> None:
    done = convert(tmp_path / "none", tmp_path / "target")
    assert (done.code, done.stderr) == (
        2,
        f"error: '{tmp_path}/none' is not there; give the folder of a model\n",
    )
