"""The program with the real wandb client, without it, and on several ranks."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

RunTrain = Callable[..., Any]
ROOT = Path(__file__).parents[2]


# -- wandb


def test_without_wandb_metrics_go_to_the_csv(
    run_train: RunTrain, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)

    run = run_train(tmp_path, "--logging.wandb.mode", "auto", "--trainer.max_steps", "2")

    assert run.code == 0
    assert "wandb: not installed, metrics are in metrics.csv (pip install wandb)" in run.stdout
    assert "train/loss" in run.columns
    assert not (run.folder / "wandb").exists()


def test_wandb_without_key_network_or_terminal_keeps_the_run_offline(
    tiny_yaml: Path, tiny_moe: str, tmp_path: Path
) -> None:
    # The real client, in a process of its own: no key, no terminal, and WANDB_MODE="" counts as unset.
    home = tmp_path / "home of the client"  # which keeps its logs there
    home.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HOME": str(home), "COLUMNS": "200"}
    done = subprocess.run(
        [
            sys.executable, "-m", "experiments.train",
            "--config", str(tiny_yaml),
            "--data.cache_dir", str(tmp_path / "cache"),
            "--logging.wandb", "{mode: auto, tags: [a test]}",
            "--model.ffn", tiny_moe,
            "--trainer.max_steps", "3",
            "--run.name", "kept",
        ],
        cwd=tmp_path,
        env={**environment, "WANDB_MODE": ""},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    assert not re.search(r"api key|enter your choice", done.stdout + done.stderr, re.IGNORECASE)
    (offline,) = (tmp_path / "runs" / "kept" / "wandb").glob("offline-run-*")
    assert f"wandb: offline; to upload: wandb sync runs/kept/wandb/{offline.name}" in done.stdout
    assert not (tmp_path / "wandb").exists()

    records = _wandb_records(offline, environment)
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    assert run["display_name"] == "kept"
    assert run["tags"] == ["a test", "moe"]
    facts = run["config"]["update"]
    assert facts["model"]["ffn"]["num_experts"] == 4
    assert {"corpus_sha256", "git_revision", "num_params", "num_active_params"} <= facts.keys()
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    assert [row["trainer/global_step"] for row in rows] == [2, 3, 3]
    assert rows[0].keys() >= {
        "train/loss",
        "train/tokens_per_second",
        "train/learning_rate",
        "train/gradient_norm",
        "routing/layer_01/load/expert_03",
        "routing/layer_00/dropped_fraction",
        "routing/layer_00/entropy",
        "routing/layer_00/max_violation",
        "routing/layer_00/load_balance",
        "routing/layer_00/router_z",
    }
    assert rows[2].keys() >= {
        "validation/loss",
        "validation/bits_per_byte",
        "validation/routing/layer_00/capacity_used",
    }
    # Charts run over optimizer steps, not over wandb's count of rows.
    assert "trainer/global_step" in str([r for r in records if r["type"] == "metric"])
    assert records[-1]["exit"]["exit_code"] == 0


def _wandb_records(run: Path, environment: dict[str, str]) -> list[Any]:
    inspected = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(run)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [json.loads(line) for line in inspected.stdout.splitlines()]


# -- several ranks


@pytest.mark.slow
@pytest.mark.parametrize("validation_tokens", [160, 64], ids=["3 batches", "1 batch"])
def test_two_processes_do_what_one_does(
    run_train: RunTrain, tiny_yaml: Path, tmp_path: Path, validation_tokens: int
) -> None:
    options = [
        "--data.validation_tokens", str(validation_tokens),
        "--logging.every_n_steps", "1",
        "--objective.load_balance", "0.0",
        "--optimizer.learning_rate", "1e-3",
    ]  # fmt: skip
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    one = run_train(tmp_path / "one", *options)
    done = subprocess.run(
        [
            sys.executable, "-m", "experiments.train",
            "--config", str(tiny_yaml),
            "--data.cache_dir", str(tmp_path / "cache"),
            "--trainer.devices", "2",
            "--trainer.strategy", "ddp",
            *options,
        ],
        cwd=tmp_path / "two",
        env={**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "200", "OMP_NUM_THREADS": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stderr
    two = type(one)(0, done.stdout, done.stderr, one.args, tmp_path / "two")
    assert len(two.rows) == len(one.rows) == 8
    assert done.stdout.count("Results in ") == 1
    # The same global batch, whoever computes which part of it.
    assert float(two.rows[0]["train/loss"]) == pytest.approx(
        float(one.rows[0]["train/loss"]), abs=1e-5
    )
    for mine, theirs in zip(one.rows, two.rows, strict=True):
        assert mine.keys() == theirs.keys()
        for name in mine.keys() & {"train/loss", "validation/loss", "validation/bits_per_byte"}:
            assert float(theirs[name]) == pytest.approx(float(mine[name]), abs=1e-3), name
    assert "sync_dist" not in done.stderr
