"""First output of every program, and the libraries that it waits for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.cli.train import DEFAULT_TIME, describe_run
from moe_ffn.runs.config import Resume, TrainConfig

ROOT = Path(__file__).parents[2]

NO_LIGHTNING = 42
"""The exit code of a program that has come as far as importing lightning."""

SLOW_LIBRARIES = (
    *(
        "lightning",
        "pytorch_lightning",
        "wandb",
        "pandas",
        "plotly",
        "datasets",
        "transformers",
        "sympy",
    ),
)

SAID = "importing lightning ...\n"

MODEL = (
    "4 layers with moe, 8 experts (swiglu), top_k k=2; 2.36 M parameters (816.38 k used by a token)"
)
PLAN = f"training: {MODEL}; 400 steps of 4,096 tokens (corpus stdlib); {DEFAULT_TIME}\n"
SHORT_PLAN = PLAN.replace("400 steps", "20 steps").replace(
    DEFAULT_TIME, "the first steps show the time left"
)

HELPED = ("train", "generate", "report", "compare", "sweep", "trace", "inspect", "dashboard")

ANSWERS = {
    **dict.fromkeys((f"{name} --help" for name in HELPED), (0, "")),
    "train --help all": (0, ""),
    "train --print-config": (0, ""),
    "train --print-schema": (0, ""),
    "train --model.ffn.num_expert 3": (
        2,
        "error: model.ffn.num_expert: unknown; did you mean 'num_experts'?\n",
    ),
    "train --config no.yaml": (2, "error: --config no.yaml: No such file or directory\n"),
    "train --resume nowhere": (2, None),
    "generate nowhere": (2, None),
    "generate RUN --prompt a --num-tokens 0": (0, ""),
    "report nowhere --every soon": (2, None),
    "compare nowhere": (2, None),
    "sweep nowhere.yaml": (2, None),
    "trace nowhere --text a": (2, None),
    "trace RUN --text a": (0, ""),
    "inspect nowhere": (2, None),
    "dashboard": (2, None),
    "--help": (0, ""),
    "--version": (0, ""),
    "trian": (2, None),
    # Only training imports lightning, and the first rank logs it.
    "train": (NO_LIGHTNING, PLAN + SAID),
    "train --trainer.max_steps 20": (NO_LIGHTNING, SHORT_PLAN + SAID),
    "train RANK=1": (NO_LIGHTNING, ""),
    "overhead": (NO_LIGHTNING, SAID),
    # The last one, since it draws with plotly.
    "report RUN": (0, ""),
}
"""A command line -> its exit code and standard error; None for any refusal."""

SCRIPT = """
import contextlib, io, json, os, sys

import moe_ffn
from experiments import overhead
from moe_ffn.cli.__main__ import main
from moe_ffn.cli.exit import exit_on_bad_input

SECOND = dict(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")

def answer(line):
    words = [sys.argv[1] if word == "RUN" else word for word in line.split()]
    if "RANK=1" in words:
        words.remove("RANK=1")
        os.environ.update(SECOND)
    own = ["moe-ffn", *(words if line != "overhead" else [])]
    printed, said = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(said):
        before, sys.argv = sys.argv, own
        code = exit_on_bad_input(overhead.main) if line == "overhead" else main()
        sys.argv = before
    for name in SECOND:
        os.environ.pop(name, None)
    return code, said.getvalue(), [name for name in SLOW if name in sys.modules]

SLOW, LINES = json.loads(sys.argv[2])
print(json.dumps({line: answer(line) for line in LINES}))
"""


@pytest.fixture(scope="module")
def answers(moe_run: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All of them in one process, whose `lightning` ends the program that imports it."""
    folder = tmp_path_factory.mktemp("first_line")
    (folder / "home").mkdir()
    (folder / "lightning").mkdir()
    (folder / "lightning" / "__init__.py").write_text(f"raise SystemExit({NO_LIGHTNING})\n")
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, moe_run.folder, json.dumps([SLOW_LIBRARIES, [*ANSWERS]])],
        cwd=folder,
        env=os.environ
        | {"PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "HOME": str(folder / "home")},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.parametrize("line", ANSWERS)
def test_an_answer_waits_for_no_slow_library(answers: dict[str, Any], line: str) -> None:
    expected, said = ANSWERS[line]
    code, stderr, slow = answers[line]

    assert (code, slow) == (expected, ["plotly"] if line == "report RUN" else [])
    if said is None:
        assert stderr.startswith("error: ")
        assert stderr.count("\n") == 1
    else:
        assert stderr == said


def test_a_resumed_run_has_less_to_do_than_the_default_run() -> None:
    config = TrainConfig()
    line = describe_run(config, Resume(Path("runs/mine"), config, {}, config))
    assert line == PLAN.strip().replace("training", "resuming runs/mine").replace(
        DEFAULT_TIME, "the first steps show the time left"
    )
