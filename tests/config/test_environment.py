"""Folders that torch needs at its import, and processes that wait or stay silent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.config.errors import ConfigError

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("script", "said"),
    [
        (
            'mkdir "$GONE" && cd "$GONE" && rmdir "$GONE"',
            "error: the current folder was removed, and torch cannot be imported in it; cd to another one\n",
        ),
        (
            "ulimit -f 0",
            "error: TMPDIR: no folder for temporary files is writable, and torch needs one; make room in "
            "/tmp, or set TMPDIR to another folder\n",
        ),
    ],
    ids=["folder removed", "no file may be written"],
)
def test_a_sentence_comes_before_torch(tmp_path: Path, script: str, said: str) -> None:
    variables = {"GONE": str(tmp_path / "gone"), "PYTHONPATH": str(ROOT), "TMPDIR": "/nowhere"}
    done = subprocess.run(
        ["bash", "-c", f'{script}; exec "$0" -m moe_ffn.cli --help', sys.executable],
        cwd=tmp_path,
        env={**os.environ, **variables, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stdout, done.stderr) == (2, "", said)


@pytest.mark.parametrize(
    ("variables", "is_first"),
    [
        ({}, True),
        ({"LOCAL_RANK": "0", "RANK": "4"}, True),  # of the second machine
        ({"LOCAL_RANK": "1", "RANK": "1"}, False),
        ({"SLURM_LOCALID": "1", "SLURM_PROCID": "1"}, False),
    ],
)
def test_a_mistake_is_reported_once_on_each_machine(
    variables: dict[str, str],
    is_first: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def mistaken(argv: object) -> int:
        raise ConfigError("model.ffn: unknown")

    assert exit_on_bad_input(mistaken) == 2
    assert capsys.readouterr().err == ("error: model.ffn: unknown\n" if is_first else "")


@pytest.mark.parametrize(("rank", "said", "waits"), [("0", "error: no\n", 0), ("1", "", 1)])
def test_under_torchrun_a_silent_process_does_not_end_first(
    rank: str,
    said: str,
    waits: int,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    def main(argv: object) -> int:
        raise ConfigError("no")

    slept: list[float] = []
    monkeypatch.setattr("moe_ffn.cli.exit.time.sleep", slept.append)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("LOCAL_RANK", rank)

    assert exit_on_bad_input(main) == 2

    assert capfd.readouterr().err == said
    assert len(slept) == waits
