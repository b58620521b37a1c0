"""`moe-ffn PROGRAM ...`: which programs there are, and that a wrong word is answered."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.cli import __main__ as console
from moe_ffn.cli.exit import LOGGER, exit_on_bad_input
from moe_ffn.cli.parser import Parser
from moe_ffn.config.errors import install
from moe_ffn.runs.config import Resume, TrainConfig
from moe_ffn.runs.folder import git_revision
from moe_ffn.runs.json_files import Facts
from moe_ffn.runs.train import DEFAULT_TIME, describe_run

ROOT = Path(__file__).parents[2]

Answer = tuple[int, str, str]
Run = Callable[..., Answer]


@pytest.fixture
def moe_ffn(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Exit code, stdout and stderr of the console command in this process."""
    monkeypatch.setattr(sys, "path", [*sys.path])

    def run(*argv: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["/usr/bin/moe-ffn", *argv])
        code = console.main()
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]], ids=str)
def test_help_lists_every_program_and_its_meaning(moe_ffn: Run, argv: list[str]) -> None:
    code, out, err = moe_ffn(*argv)
    assert (code, err) == (0, "")
    for name, meaning in console.PROGRAMS.items():
        assert f"  {name} {meaning}" in " ".join(out.split()).replace(f" {name} ", f"  {name} ")


def test_arguments_reach_the_program_and_its_exit_code_comes_back(
    moe_ffn: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    received: list[list[str]] = []

    def main(argv: list[str]) -> int:
        received.append(list(argv))
        return 7

    monkeypatch.setattr("moe_ffn.cli.generate.main", main)

    assert moe_ffn("generate", "run", "--seed", "1") == (7, "", "")
    assert received == [["run", "--seed", "1"]]


@pytest.mark.parametrize(
    ("word", "hint"),
    [
        ("trian", "; did you mean 'train'?"),
        ("--versoin", "; did you mean '--version'?"),
        ("zzz", f"; known: {', '.join(console.PROGRAMS)}"),
    ],
)
def test_an_unknown_word_is_answered_with_the_nearest(moe_ffn: Run, word: str, hint: str) -> None:
    assert moe_ffn(word) == (2, "", f"error: unknown program '{word}'{hint}\n")


def test_a_module_in_the_current_folder_is_found(
    moe_ffn: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The script of a console command has its own folder on the path, `python -m` the current one."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a_module_of_mine.py").write_text(
        "from moe_ffn import GatedConfig\nclass Mine(GatedConfig, frozen=True):\n    type: str\n"
    )

    code, out, err = moe_ffn("train", "--model.ffn", "a_module_of_mine:Mine", "--print-config")

    assert (code, err) == (0, "importing 'a_module_of_mine', which runs its code\n")
    assert "type: a_module_of_mine:Mine" in out


def test_the_install_command_and_the_revision_tell_the_clone_from_the_package(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert install("train") == "pip install -e '.[train]'"
    monkeypatch.setattr("moe_ffn.config.errors._ROOT", tmp_path)
    assert install("train") == "pip install 'moe_ffn[train]'"
    assert git_revision() is None, (
        "git would name the commit of a project whose .venv has the package"
    )


# -- standard streams: a reader that goes away, a closed stream, the level of the log


@pytest.mark.parametrize(
    ("argv", "shown"),
    [
        ([], "info\nwarning\nerror: error\nlost: error\n"),
        (["-v"], "debug\ninfo\nwarning\nerror: error\nlost: error\n"),
        (["--quiet"], "error: error\nlost: error\n"),
    ],
)
def test_flags_choose_the_level_of_the_log(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    argv: list[str],
    shown: str,
) -> None:
    def logs(argv: Sequence[str]) -> int:
        Parser().parse_args(argv)
        for level in ("debug", "info", "warning", "error"):
            getattr(logging.getLogger("moe_ffn.somewhere"), level)(level)
        LOGGER.error("error", extra={"prefix": "lost"})
        return 0

    monkeypatch.setattr(sys, "argv", ["program", *argv])

    assert exit_on_bad_input(logs) == 0
    assert capsys.readouterr().err == shown


def test_the_first_rank_logs_warnings_and_every_rank_logs_errors(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LOCAL_RANK", "1")
    LOGGER.warning("once")
    LOGGER.error("by each")

    assert capsys.readouterr().err == "error: by each\n"


# -- first output of every program, and the libraries that it waits for


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
    "train --help | true": (1, ""),  # its reader has gone away
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
"""Command lines with their exit code and standard error; None stands for any error message."""

SCRIPT = '''
import contextlib, io, json, os, sys

import moe_ffn
from experiments import overhead
from moe_ffn.cli.__main__ import main
from moe_ffn.cli.exit import exit_on_bad_input

SECOND = dict(RANK="1", LOCAL_RANK="1", WORLD_SIZE="2", MASTER_ADDR="localhost", MASTER_PORT="1")

def without_a_reader(words):
    """The program in a copy of this process, which ends as a process does."""
    with open("said.txt", "w+") as said:
        if not (copy := os.fork()):
            read, write = os.pipe()
            os.close(read)
            os.dup2(write, 1)
            os.dup2(said.fileno(), 2)
            sys.argv = ["moe-ffn", *words]
            raise SystemExit(main())
        code = os.waitstatus_to_exitcode(os.waitpid(copy, 0)[1])
        said.seek(0)
        return code, said.read(), []

def answer(line):
    if line.endswith(" | true"):
        return without_a_reader(line.split()[:-2])
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
'''


@pytest.fixture(scope="module")
def answers(moe_run: Any, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers to all command lines in one process, whose fake `lightning` ends a program that imports it."""
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
    line = describe_run(config, Resume(Path("runs/mine"), config, {}, config, Facts()))
    assert line == PLAN.strip().replace("training", "resuming runs/mine").replace(
        DEFAULT_TIME, "the first steps show the time left"
    )
