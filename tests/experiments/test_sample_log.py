"""The texts of a run, validation by validation."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

RunTrain = Callable[..., Any]


def test_a_text_at_every_validation_and_the_last_is_the_sample(moe_run: Any) -> None:
    lines = (moe_run.folder / "samples.jsonl").read_text().splitlines()
    samples = [json.loads(line) for line in lines]

    assert [sample["step"] for sample in samples] == [4, 6]
    assert {sample["prompt"] for sample in samples} == {"def "}
    assert all(sample["text"] for sample in samples)
    assert (moe_run.folder / "sample.txt").read_text() == "def " + samples[-1]["text"]


def test_a_model_that_sees_both_sides_writes_none(run_train: RunTrain, tmp_path: Path) -> None:
    run = run_train(tmp_path, "--model.causal", "false", "--trainer.max_steps", "2")

    assert run.code == 0
    assert not (run.folder / "samples.jsonl").exists()
    assert not (run.folder / "sample.txt").exists()


def test_no_tokens_are_no_sample(run_train: RunTrain, tmp_path: Path) -> None:
    run = run_train(tmp_path, "--sample.num_tokens", "0", "--trainer.max_steps", "2")

    assert run.code == 0
    assert not (run.folder / "samples.jsonl").exists()
