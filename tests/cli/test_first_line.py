"""What a person who pressed Enter sees first, and which libraries that waits for."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

NO_LIGHTNING = 42
"""The exit code of a program that has come as far as importing lightning."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds a `lightning` whose import ends the program."""
    folder = tmp_path_factory.mktemp("first_line")
    (folder / "home").mkdir()
    (folder / "packages" / "lightning").mkdir(parents=True)
    module = folder / "packages" / "lightning" / "__init__.py"
    module.write_text(f"raise SystemExit({NO_LIGHTNING})\n")
    return folder


def answer(
    folder: Path, program: str, *argv: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """A program that cannot import lightning."""
    path = os.pathsep.join([str(folder / "packages"), str(ROOT)])
    return subprocess.run(
        [sys.executable, "-m", f"experiments.{program}", *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "HOME": str(folder / "home"), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


@pytest.mark.parametrize("program", ["train", "overhead"])
def test_the_import_of_lightning_is_said_before_it_begins(folder: Path, program: str) -> None:
    done = answer(folder, program)

    assert (done.returncode, done.stderr) == (NO_LIGHTNING, "importing lightning ...\n")


def test_of_several_ranks_the_first_alone_says_so(folder: Path) -> None:
    second = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}
    done = answer(folder, "train", **second, MASTER_PORT="1")

    assert (done.returncode, done.stderr) == (NO_LIGHTNING, "")


@pytest.mark.parametrize("flag", ["--print-config", "--print-schema", "--help"])
def test_where_nothing_is_trained_nothing_is_said(folder: Path, flag: str) -> None:
    done = answer(folder, "train", flag)

    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "program", [("generate", "--prompt", "a"), ("trace", "--text", "a")], ids=lambda argv: argv[0]
)
def test_a_trained_model_is_used_without_lightning(
    folder: Path, moe_run: Any, program: tuple[str, ...]
) -> None:
    name, *argv = program
    done = answer(folder, name, str(moe_run.folder), *argv)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout


SLOW_LIBRARIES = ("lightning", "pytorch_lightning", "wandb", "plotly", "datasets", "transformers")

ANSWERS = {
    "train --help": 0,
    "train --help all": 0,
    "train --print-config": 0,
    "train --model.ffn.num_expert 3": 2,
    "train --resume nowhere": 2,
    "generate --help": 0,
    "generate nowhere": 2,
    "report --help": 0,
    "report nowhere --every soon": 2,
    "compare --help": 0,
    "compare nowhere.yaml": 2,
    "trace --help": 0,
    "trace nowhere --text a": 2,
    "dashboard --help": 0,
    "dashboard": 2,
    "--help": 0,
    "--version": 0,
    "trian": 2,
}
"""A command line -> its exit code; no work is done for any of them."""


def test_an_answer_waits_for_no_slow_library(tmp_path: Path) -> None:
    """All of them one after the other in one process, which has to import torch once."""
    code = (
        "import contextlib, io, json, sys\n"
        "from moe_ffn.cli.__main__ import main\n"
        "def answer(line):\n"
        "    sys.argv = ['moe-ffn', *line.split()]\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        "        try:\n"
        "            code = main()\n"
        "        except SystemExit as end:\n"
        "            code = end.code or 0\n"
        f"    return code, [name for name in {SLOW_LIBRARIES} if name in sys.modules]\n"
        f"print(json.dumps({{line: answer(line) for line in {list(ANSWERS)}}}))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {line: [code, []] for line, code in ANSWERS.items()}


def test_what_is_imported_already_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    from moe_ffn.cli.exit import announce_import

    announce_import("sys", "os")
    assert capsys.readouterr().err == ""
    announce_import("sys", "no_such_package")
    assert capsys.readouterr().err == "importing no_such_package ...\n"
