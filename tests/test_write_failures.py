"""What is said of a disk that fails: once a trouble, however often it comes and goes."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ffn import files
from moe_ffn.files import QUIET_SECONDS, WriteFailures

FULL = OSError(28, "No space left on device")
FAILS = (
    "disk: 'run' cannot be written (No space left on device); training continues and tries again"
)
WORKS = "disk: 'run' can be written again"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Its last entry is the time."""
    times = [0.0]
    monkeypatch.setattr(files.time, "monotonic", lambda: times[-1])
    return times


@pytest.mark.usefixtures("clock")
def test_a_problem_that_comes_and_goes_is_reported_once(capsys: pytest.CaptureFixture[str]) -> None:
    disk = WriteFailures(Path("run"))

    for _ in range(3):
        disk.failed(FULL)
        disk.failed(FULL)
        disk.succeeded()
        disk.succeeded()

    assert capsys.readouterr().err.splitlines() == [FAILS, WORKS]


def test_a_later_failure_is_reported_again(
    clock: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    disk = WriteFailures(Path("run"))

    disk.failed(FULL)
    disk.succeeded()
    clock.append(QUIET_SECONDS + 1)
    disk.failed(FULL)

    assert capsys.readouterr().err.splitlines() == [FAILS, WORKS, FAILS]
