"""A model in the hub's layout is read like any folder, ours and that of transformers."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import torch

from moe_ffn import load_pretrained
from moe_ffn.runs.folder import MODEL_FOLDER
from moe_ffn.weights.pretrained import TOKENIZER_FILE
from tests.helpers import theirs
from tests.helpers.tiny_runs import finished_copy, options, run_here


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
        ("evaluate", str(snapshot), "--data", str(tmp_path / "text.txt")),
        ("convert", str(snapshot), str(tmp_path / "converted")),
        ("train", *options(tmp_path / "new", init_from=str(snapshot), trainer__max_steps="1")),
    ):
        done = run_here(*argv, program=f"moe_ffn.cli.{program}")
        assert done.code == 0, (program, done.stderr)


def test_a_model_of_transformers(run: Path, tmp_path: Path) -> None:
    family, sizes = theirs.MODELS["mixtral"]
    theirs.make(family, {**sizes, "vocab_size": 257}).save_pretrained(tmp_path / "theirs")
    shutil.copy(run / MODEL_FOLDER / TOKENIZER_FILE, tmp_path / "theirs")
    snapshot = to_snapshot(tmp_path / "theirs")

    for program, *argv in (
        ("convert", str(snapshot), str(tmp_path / "converted")),
        ("trace", str(snapshot), "--text", "a mat"),
    ):
        done = run_here(*argv, program=f"moe_ffn.cli.{program}")
        assert done.code == 0, (program, done.stderr)


def test_a_damaged_model_inside_a_run_is_named(run: Path) -> None:
    model = run / MODEL_FOLDER
    (model / "config.json").write_text("{ cut")

    done = run_here(str(model), program="moe_ffn.cli.evaluate")

    assert (done.code, done.own_lines) == (
        2,
        [
            f"error: '{model}' is no run: it has no config.yaml; its config.json is damaged; copy it again"
        ],
    )
