"""What goes to all loggers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger

from moe_ffn.training.monitoring.metrics_file import MetricsFile
from moe_ffn.training.monitoring.wandb import WandbRun, alert, close
from tests.helpers.stub_wandb import StubRun


@pytest.fixture(autouse=True)
def _activated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment, so that wandb's program is found by its name."""
    monkeypatch.setenv("PATH", str(Path(sys.executable).parent))


@pytest.fixture
def loggers(run_folder: Path) -> Any:
    """`loggers(StubRun(...), online=True)`: the log of rows, and wandb's with that run."""

    def make(run: StubRun, online: bool) -> list[Logger]:
        return [MetricsFile(run_folder / "metrics.jsonl"), WandbRun(run, online)]

    return make


def test_an_alert_is_sent_where_wandb_is_online(loggers: Any) -> None:
    run = StubRun()

    alert(loggers(run, online=True), "collapse", "layer_03 sends all to expert 2")

    assert run.alerts == [("collapse", "layer_03 sends all to expert 2")]


def test_an_alert_is_sent_nowhere_else(loggers: Any) -> None:
    run = StubRun()

    alert(loggers(run, online=False), "collapse", "layer_03 sends all to expert 2")

    assert run.alerts == []


def test_the_title_of_an_alert_is_as_long_as_wandb_takes(loggers: Any) -> None:
    run = StubRun()

    alert(loggers(run, online=True), "x" * 100, "text")

    assert run.alerts == [("x" * 63, "text")]


def test_an_alert_that_fails_is_told_once(loggers: Any, capsys: pytest.CaptureFixture[str]) -> None:
    failing = loggers(StubRun(failing=ConnectionResetError("Connection lost")), online=True)

    alert(failing, "collapse", "once")
    alert(failing, "collapse", "twice")

    assert capsys.readouterr().err == "wandb: Connection lost; metrics go to metrics.jsonl alone\n"


@pytest.mark.parametrize(("status", "exit_code"), [("success", 0), ("failed", 1)])
def test_closing_ends_the_run(loggers: Any, status: str, exit_code: int) -> None:
    run = StubRun()

    close(loggers(run, online=True), status)

    assert run.exit_codes == [exit_code]


def test_closing_says_how_to_upload_what_was_not(
    loggers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    close(loggers(StubRun(failing=TimeoutError("Timed out finishing run.")), online=True))

    assert capsys.readouterr().err == (
        "wandb: Timed out finishing run; "
        "upload what it kept: wandb sync '/somewhere else/wandb/run-1'\n"
    )


class FullDisk(CSVLogger):
    """Cannot write what is pending."""

    def finalize(self, status: str) -> None:
        raise OSError(28, f"No space left on device, {self.root_dir}")


def test_a_logger_that_cannot_end_keeps_no_other_from_ending() -> None:
    run = StubRun()

    with pytest.raises(OSError, match="No space left on device, first"):
        close([FullDisk("first"), WandbRun(run, online=True), FullDisk("second")], "failed")

    assert run.exit_codes == [1]
