"""`python -m experiments.selftest`: what it says and how it ends."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from unittest import SkipTest

import pytest

from experiments.selftest import __main__ as program
from experiments.selftest.case import Case, Chapter, try_case
from moe_ffn.cli.exit import exit_on_bad_input

SelfTest = Callable[..., tuple[int, str, str]]


def _keeps(folder: Path) -> str:
    (folder / "file").touch()
    return "1 file"


def _breaks(folder: Path) -> None:
    raise AssertionError("2 of 3 were lost")


def _cannot_be_tried(folder: Path) -> None:
    raise FileNotFoundError("no tmpfs here")


GOOD = Chapter("good", "Nothing is lost.", lambda: [Case("one", _keeps, short=True)])
BAD = Chapter("bad", "Nothing is silent.", lambda: [Case("two", _breaks), Case("three", _keeps)])


@pytest.fixture
def selftest(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> SelfTest:
    """`selftest("good")` -> exit code and what was printed."""
    monkeypatch.setattr(program, "CHAPTERS", (GOOD, BAD))

    def run(*argv: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["selftest", *argv])
        code = exit_on_bad_input(program.main)
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def test_kept_and_broken_promises_are_counted(selftest: SelfTest) -> None:
    code, out, _ = selftest("--markdown")

    assert code == 1
    assert "  kept      one (0.0 s)  1 file" in out
    assert "  BROKEN    two (0.0 s)  2 of 3 were lost" in out
    assert "| `good` | Nothing is lost. | 1 | 0 | 0 | 0 |" in out
    assert "| `bad` | Nothing is silent. | 1 | 1 | 0 | 0 |" in out


def test_one_chapter_alone(selftest: SelfTest) -> None:
    code, out, _ = selftest("good")

    assert code == 0
    assert "two" not in out


def test_the_short_version(selftest: SelfTest) -> None:
    code, out, _ = selftest("--short")

    assert code == 0
    assert "two" not in out


def test_the_list(selftest: SelfTest) -> None:
    assert selftest("--list")[1] == "good       Nothing is lost.\nbad        Nothing is silent.\n"


def test_an_unknown_chapter(selftest: SelfTest) -> None:
    code, _, err = selftest("goood")

    assert code == 2
    assert err == "error: no chapter 'goood'; did you mean 'good'?; known: good, bad\n"


def test_what_cannot_be_tried_has_not_been_passed() -> None:
    outcome = try_case(Case("x", _cannot_be_tried))

    assert outcome.failure.startswith("FileNotFoundError: no tmpfs here (test_selftest_program.py:")


def test_what_this_machine_cannot_try_is_neither_kept_nor_broken() -> None:
    def check(folder: Path) -> None:
        raise SkipTest("no namespaces here")

    outcome = try_case(Case("x", check))

    assert outcome.verdict == "NOT TRIED"
    assert outcome.hindrance == "no namespaces here"
