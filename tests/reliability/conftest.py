"""Counts what is tried here: after `make test-reliability`, a table for docs/reliability.md.

Below it stands what cases have measured, which they hand to `record_property("measured", ...)`.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterable
from pathlib import Path

import pytest

HERE = Path(__file__).parent
COUNTED = ("passed", "failed", "error", "skipped")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """A line for each file, where nothing but these files was run."""
    reports = [
        (outcome, report)
        for outcome in COUNTED
        for report in terminalreporter.getreports(outcome)
        if outcome != "passed" or report.when == "call"
    ]
    files = {_file(report) for _, report in reports}
    if not files or any(file.parent != HERE for file in files):
        return
    terminalreporter.write_line("")
    terminalreporter.write_line(
        "| chapter | what is promised | kept | broken | not tried | seconds |"
    )
    terminalreporter.write_line("|---|---|---|---|---|---|")
    for file in sorted(files):
        mine = [(outcome, report) for outcome, report in reports if _file(report) == file]
        terminalreporter.write_line(_line(file, mine))
    measured = Counter(
        f"{_name(_file(report))}: {text}"
        for _, report in reports
        for kind, text in getattr(
            report, "user_properties", ()
        )  # a file that cannot be collected has none
        if kind == "measured"
    )
    for text, times in sorted(measured.items()):
        terminalreporter.write_line(f"{text} ({times} times)" if times > 1 else text)


def _file(report: pytest.TestReport) -> Path:
    return HERE.parents[1] / report.nodeid.partition("::")[0]


def _name(file: Path) -> str:
    return file.stem.removeprefix("test_")


def _line(file: Path, reports: Iterable[tuple[str, pytest.TestReport]]) -> str:
    counts: Counter[str] = Counter()
    seconds = 0.0
    for outcome, report in reports:
        counts[outcome] += 1
        seconds += getattr(report, "duration", 0.0)  # not of a file that cannot be imported
    broken = counts["failed"] + counts["error"]
    return (
        f"| `{_name(file)}` | {_promise(file)} | {counts['passed']} | {broken} | {counts['skipped']} "
        f"| {seconds:.0f} |"
    )


def _promise(file: Path) -> str:
    """The first paragraph of a file's docstring, on one line."""
    text = ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or ""
    return " ".join(text.partition("\n\n")[0].split())
