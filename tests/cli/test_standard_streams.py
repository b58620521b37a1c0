"""Standard streams of the programs: a reader that goes away, a closed stream, and the level of the log."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.logs import LOGGER
from moe_ffn.cli.parser import Parser

ROOT = Path(__file__).parents[2]


def test_a_reader_that_went_away_ends_a_program_without_a_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "experiments.train", "--help"],
        cwd=ROOT,
        stdout=write,
        stderr=subprocess.PIPE,
        check=False,
    )
    os.close(write)

    assert (done.returncode, done.stderr) == (1, b"")


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
