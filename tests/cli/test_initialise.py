"""`moe-ffn initialise` and `init_from`: a run becomes a model folder and then the start of another run."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moe_ffn
from moe_ffn.data.tokenizer import BPETokenizer
from tests.helpers.programs_in_process import Result
from tests.helpers.tiny_runs import Finished, run_here

RunTrain = Callable[..., Result]

FFN = (
    "{type: moe, num_experts: 4, router: {type: top_k, k: 2, renormalize: true}, "
    "experts: {type: swiglu, d_ff: 24}}"
)
STILL = ("--optimizer.learning_rate", "1e-12")


@pytest.fixture(scope="module")
def dense(run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Result:
    options = ("--model.ffn", "{type: swiglu, d_ff: 24}", "--run.name", "dense")
    return run_train(tmp_path_factory.mktemp("dense"), *options)


@pytest.fixture(scope="module")
def sparse(dense: Result, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model folder of the dense run upcycled."""
    folder = tmp_path_factory.mktemp("sparse") / "sparse"
    done = initialise(dense.folder, folder, "--method.num_experts", "4")
    assert done.code == 0, done.stderr
    assert "parameters         " in done.stdout
    assert f"written: '{folder}', a model folder of moe_ffn\n" in done.stdout
    (folder.parent / "printed.txt").write_text(done.stdout)
    differ = float(done.stdout.partition("differ by up to ")[2].split(";")[0])
    assert 0 < differ < 1e-5
    return folder


def initialise(source: Path, output: Path, *options: str) -> Finished:
    return run_here(
        "--source", str(source), "--output", str(output), *options, program="moe_ffn.cli.initialise"
    )  # fmt: skip


def loss_of(result: Result) -> float:
    return json.loads((result.folder / "summary.json").read_text())["validation_loss"]


def test_a_run_begins_where_the_upcycled_one_ended(
    dense: Result, sparse: Path, run_train: RunTrain, tmp_path: Path
) -> None:
    *_, before, command = (sparse.parent / "printed.txt").read_text().splitlines()
    assert before == "start a run from it:"
    words = shlex.split(command.removeprefix("  moe-ffn train "))
    assert words[:6] == [
        *("--init_from", str(sparse), "--model.d_model", "16", "--model.num_layers", "2")
    ]

    done = run_train(tmp_path, *words, *STILL)

    assert done.code == 0, done.stderr
    assert f"init_from: 20 of 20 tensors come from {sparse} " in done.stdout
    assert "  new: " not in done.stdout
    assert loss_of(done) == pytest.approx(loss_of(dense), abs=1e-5)


def test_a_run_begins_with_a_run_and_needs_it_no_more_once_it_has_saved(
    dense: Result, run_train: RunTrain, tmp_path: Path
) -> None:
    for copied in ("a", "b"):
        shutil.copytree(dense.folder, tmp_path / copied)
    shutil.rmtree(tmp_path / "b/model")  # an unfinished run has none
    options = ("--model.ffn", "{type: swiglu, d_ff: 24}", *STILL)
    losses = []
    for copied in ("a", "b"):
        (tmp_path / f"of_{copied}").mkdir()
        done = run_train(tmp_path / f"of_{copied}", *options, "--init_from", str(tmp_path / copied))
        assert done.code == 0, done.stderr
        losses.append(loss_of(done))
    assert losses == pytest.approx([loss_of(dense)] * 2, abs=1e-5)
    folder = done.folder
    assert f"init_from: {tmp_path / 'b'}\n" in (folder / "config.yaml").read_text()
    shutil.rmtree(tmp_path / "b")

    rejected = run_here(
        "--resume", str(folder), "--init_from", "elsewhere", "--trainer.max_steps", "8"
    )
    assert rejected.code == 2
    assert "init_from: is " in rejected.stderr
    assert "cannot become elsewhere" in rejected.stderr
    resumed = run_here("--resume", str(folder), "--trainer.max_steps", "8")

    assert resumed.code == 0, resumed.stderr
    assert "init_from: of" not in resumed.stdout


def test_a_run_without_a_checkpoint_begins_with_the_folder_again(
    sparse: Path, run_train: RunTrain, tmp_path: Path
) -> None:
    done = run_train(tmp_path, "--model.ffn", FFN, "--init_from", str(sparse))
    for path in (done.folder / "checkpoints").iterdir():
        path.unlink()
    (done.folder / "summary.json").unlink()
    shutil.rmtree(done.folder / "model")

    again = run_here("--resume", str(done.folder))

    assert again.code == 0, again.stderr
    assert "from the start" in again.stdout
    assert f"init_from: 20 of 20 tensors come from {sparse} " in again.stdout
    assert (
        loss_of(done) == json.loads((done.folder / "summary.json").read_text())["validation_loss"]
    )


def test_a_mismatched_init_from_creates_no_run(
    sparse: Path, run_train: RunTrain, tmp_path: Path
) -> None:
    done = run_train(tmp_path, "--init_from", str(sparse), "--model.d_model", "32")
    said = f"embedding.weight is (257, 16) in '{sparse}' and (257, 32) in this model, and "
    assert done.code == 2
    assert f"error: init_from: {said}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "runs").exists()


def test_pruning_selects_experts_by_their_use_on_a_text(
    dense: Result, sparse: Path, corpus: Path, tmp_path: Path
) -> None:
    cache = ("--data.cache_dir", str(tmp_path / "cache"), "--num_tokens", "200")
    text = ("--data.corpus", f"{{type: text, paths: [{corpus}]}}", "--data.seq_len", "16", *cache)
    done = initialise(
        sparse, tmp_path / "small", "--method.type", "prune", "--method.num_experts", "2", *text
    )
    assert done.code == 0, done.stderr
    small = moe_ffn.load_pretrained(tmp_path / "small")
    assert small.get_parameter("layers.0.ffn.experts.down").shape == (2, 16, 24)

    table = tmp_path / "table.json"
    done = run_here(
        "--source", str(sparse), "--num_experts", "[4, 2]", "--methods", "[reap, merge, random]",
        "--num_draws", "2", "--json", str(table), *text, "--data.validation_tokens", "160",
        program="moe_ffn.cli.pruning",
    )  # fmt: skip
    assert done.code == 0, done.stderr
    found = json.loads(table.read_text())
    assert [len(losses) for losses in found["losses"]["2"].values()] == [1, 1, 2]
    every = [loss for losses in found["losses"].values() for of in losses.values() for loss in of]
    # All of its experts are one dense block, so that none is missed.
    assert every == pytest.approx([found["loss"]] * len(every), abs=1e-6)
    assert found["loss"] == pytest.approx(loss_of(dense), abs=1e-5)
    assert "50%" in done.stdout


def test_models_of_other_tokens_are_not_mixed(dense: Result, tmp_path: Path) -> None:
    model: Any = moe_ffn.load_pretrained(dense.folder / "model")
    tokenizer = moe_ffn.load_tokenizer(dense.folder / "model")
    definition = tokenizer.to_hugging_face()
    assert definition is not None
    vocabulary = definition["model"]["vocab"]
    first, second = sorted(vocabulary, key=vocabulary.get)[:2]
    vocabulary[first], vocabulary[second] = 1, 0
    moe_ffn.save_pretrained(model, tmp_path / "other", BPETokenizer(definition))
    done = run_here(
        "--source", str(dense.folder), str(tmp_path / "other"), "--output", str(tmp_path / "new"),
        "--method.type", "mix", program="moe_ffn.cli.initialise",
    )  # fmt: skip

    assert done.code == 2
    assert "token 0 is b'\\x00' in" in done.stderr
