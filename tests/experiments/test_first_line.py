"""What a person who pressed Enter sees first, while torch is still to be imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

NO_TORCH = 42
"""The exit code of a program that has come as far as importing torch."""

PROGRAMS = {
    "train": ([], "torch and lightning"),
    "overhead": ([], "torch and lightning"),
    "generate": (["run", "--prompt", "a"], "torch"),
    "trace": (["run", "--text", "a"], "torch"),
    "benchmark": (["--shape", "4,4,4,4,2,fp32"], "torch"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds what looks like a run, and a `torch` whose import ends the program."""
    folder = tmp_path_factory.mktemp("first_line")
    (folder / "home").mkdir()
    (folder / "run" / "checkpoints").mkdir(parents=True)
    for name in ("config.yaml", "tokenizer.json"):
        (folder / "run" / name).touch()
    (folder / "packages" / "torch").mkdir(parents=True)
    (folder / "packages" / "torch" / "__init__.py").write_text(f"raise SystemExit({NO_TORCH})\n")
    return folder


def answer(folder: Path, program: str, *argv: str, **variables: str) -> tuple[int, str]:
    """Exit code and stderr of a program that cannot import torch."""
    path = os.pathsep.join([str(folder / "packages"), str(ROOT)])
    done = subprocess.run(
        [sys.executable, "-m", f"experiments.{program}", *argv],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path, "HOME": str(folder / "home"), **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    return done.returncode, done.stderr


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_import_of_torch_is_said_before_it_begins(folder: Path, program: str) -> None:
    argv, packages = PROGRAMS[program]

    assert answer(folder, program, *argv) == (NO_TORCH, f"importing {packages} ...\n")


def test_of_several_ranks_the_first_alone_says_so(folder: Path) -> None:
    second = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "localhost"}

    assert answer(folder, "train", **second, MASTER_PORT="1") == (NO_TORCH, "")


@pytest.mark.parametrize("flag", ["--print-config", "--print-schema", "--help"])
def test_where_nothing_is_trained_nothing_is_said(folder: Path, flag: str) -> None:
    assert answer(folder, "train", flag) == (0, "")


def test_what_is_imported_already_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    from moe_ffn.cli.exit import announce_import

    announce_import("sys", "os")
    assert capsys.readouterr().err == ""
    announce_import("sys", "no_such_package")
    assert capsys.readouterr().err == "importing no_such_package ...\n"
