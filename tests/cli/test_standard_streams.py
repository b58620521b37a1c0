"""Standard streams of the programs: a reader that goes away, a closed stream, and the level of the log."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence

import pytest

from moe_ffn.cli import train
from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.logs import LOGGER
from moe_ffn.cli.parser import Parser


def test_a_reader_that_went_away_ends_a_program_without_a_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    read, write = os.pipe()
    os.close(read)
    before = os.dup(1)
    os.dup2(write, 1)
    monkeypatch.setattr(sys, "argv", ["train", "--help"])
    try:
        with open(1, "w", closefd=False) as stdout:
            monkeypatch.setattr(sys, "stdout", stdout)
            assert exit_on_bad_input(train.main) == 1
    finally:
        os.dup2(before, 1)
        for descriptor in (before, write):
            os.close(descriptor)


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
