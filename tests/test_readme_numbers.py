"""The numbers of the README are compared with those of the default run.

    python -m tests.test_readme_numbers    # trains the default model, and writes its numbers

The default run takes minutes. So that a test can tell whether its numbers are old, the record of it holds its
options and the losses of the first three steps of the default model on LICENSE, a text that never changes.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from moe_ffn.config.option_tree import flatten
from moe_ffn.config.yaml_files import validate
from moe_ffn.data.prepare import prepare
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import FACTS_FILE, SUMMARY_FILE, git_revision
from moe_ffn.runs.train import DEFAULT_TIME
from moe_ffn.studies import timing
from moe_ffn.training.objective import Objective, objective

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
RECORD = ROOT / "docs/performance/default_run.json"
COMMAND = "python -m experiments.train"
ON_CPU = {"accelerator": "cpu", "devices": 1}
"""Options of the trainer that make the numbers the same on a machine with GPUs."""
BEGIN, END = "<!-- written by `make readme` -->\n", "<!-- end of what `make readme` writes -->\n"

NUM_FIRST_STEPS = 3

LOSS_TOLERANCE = 2e-4
"""Tolerance in nats for other processors; bfloat16, or another model or optimizer, differs by more."""


def default_run() -> dict[str, Any]:
    """Train the default model; returns the record of the run."""
    on_cpu = [part for key, value in ON_CPU.items() for part in (f"--trainer.{key}", str(value))]
    name = f"readme-{datetime.now():%Y%m%d-%H%M%S}"
    start = time.monotonic()
    done = subprocess.run(
        [*COMMAND.replace("python", sys.executable, 1).split(), *on_cpu, "--run.name", name],
        cwd=ROOT,
        env={**os.environ, "COLUMNS": "100"},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    seconds = time.monotonic() - start
    folder = ROOT / TrainConfig().run.output_dir / name
    facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
    summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    return {
        "command": COMMAND,
        "date": f"{datetime.now():%B %Y}",
        "git_revision": git_revision(),
        **{key: facts[key] for key in ("precision", "num_threads", "corpus_sha256", "versions")},
        "seconds": round(seconds),
        "tokens_per_second": round(summary["tokens_per_second"]),
        "validation_loss": summary["validation_loss"],
        "screen": results_of(done.stdout),
        "first_losses": first_steps(),
        "options": flatten(TrainConfig().to_dict()),
    }


def first_steps() -> list[float]:
    """The losses of the default model's first steps on LICENSE, by a loop without a run around it."""
    losses: list[float] = []

    def recorded(*given: Any, **options: Any) -> Objective:
        found = objective(*given, **options)
        losses.append(found.cross_entropy.item())
        return found

    with tempfile.TemporaryDirectory() as folder, patch.object(timing, "objective", recorded):
        corpus = {"type": "text", "paths": [str(ROOT / "LICENSE")]}
        data = {"corpus": corpus, "cache_dir": folder}
        config = validate(
            TrainConfig, {"data": data, "trainer": {"max_steps": NUM_FIRST_STEPS, **ON_CPU}}
        )
        training = timing.Training(config, prepare(config.data), torch.device("cpu"))
        for _ in range(NUM_FIRST_STEPS):
            training.step()
    return losses


def results_of(screen: str) -> str:
    """Return the lines from the losses to the sample or the list of files."""
    found = re.search(r"^validation loss .*?(?=\n\n(?:Sample:|Results in ))", screen, re.M | re.S)
    assert found, f"the run printed no results; run it by hand: {COMMAND}"
    return "\n".join(line.rstrip() for line in found[0].splitlines())


def readme_block(record: Mapping[str, Any]) -> str:
    """The text between the two comments of the README, and the comments."""
    minutes, seconds = divmod(record["seconds"], 60)
    threads = record["num_threads"]
    losses = record["screen"].partition("\n\n")[0]
    return (
        f"{BEGIN}```text\n{losses}\n```\n\n"
        f"That took {minutes} min {seconds} s on {threads} CPU core{'s' * (threads > 1)} with torch "
        f"{record['versions']['torch'].partition('+')[0]}, in {record['date']}.\n{END}"
    )


def with_block(readme: str, block: str) -> str:
    """The README with this block in place of the one it has."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    assert all((begin, end)), f"README.md has no lines '{BEGIN.strip()}' and '{END.strip()}'"
    return before + block + after


@pytest.fixture
def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def test_the_numbers_of_the_readme_are_those_of_this_code(record: dict[str, Any]) -> None:
    write_anew = "write them anew: make readme"
    options = flatten(TrainConfig().to_dict())

    assert readme_block(record) in README.read_text(encoding="utf-8"), write_anew
    measured = f"about {record['seconds'] / 60:.0f} minutes on {record['num_threads']} CPU cores"
    assert measured == DEFAULT_TIME, "that is what `make train` says first"
    assert {path: options[path] for path in record["options"]} == record["options"], write_anew
    losses = pytest.approx(record["first_losses"], abs=LOSS_TOLERANCE)
    assert first_steps() == losses, write_anew


if __name__ == "__main__":
    new = default_run()
    text = with_block(README.read_text(encoding="utf-8"), readme_block(new))
    RECORD.write_text(json.dumps(new, indent=2) + "\n", encoding="utf-8")
    README.write_text(text, encoding="utf-8")
    print(readme_block(new))
