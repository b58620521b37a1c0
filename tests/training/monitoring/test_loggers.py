"""What goes to all loggers, and the log of rows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.loggers import CSVLogger, Logger
from lightning.pytorch.utilities import rank_zero_only

from moe_ffn.training.monitoring.loggers import MetricsFile, WandbRun, alert, close
from tests.helpers.fake_wandb import StubRun


@pytest.fixture
def loggers(run_folder: Path) -> Any:
    """`loggers(StubRun(...), online=True)`: the log of rows, and wandb's with that run."""

    def make(run: StubRun, online: bool) -> list[Logger]:
        return [MetricsFile(run_folder / "metrics.jsonl"), WandbRun(run, online)]

    return make


@pytest.mark.parametrize("online", [True, False])
def test_an_alert_is_sent_where_wandb_is_online(loggers: Any, online: bool) -> None:
    run = StubRun()
    alert(loggers(run, online), "x" * 100, "layer_03 sends all to expert 2")
    cut = "x" * 63  # the longest title that wandb takes
    assert run.alerts == ([(cut, "layer_03 sends all to expert 2")] if online else [])


def test_failed_rows_and_alerts_are_reported_once(
    loggers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    failing = loggers(StubRun(failing=ConnectionResetError("Connection lost")), online=True)
    alert(failing, "collapse", "once")
    failing[1].log_metrics({"loss": 1.0}, step=1)
    assert capsys.readouterr().err == "wandb: Connection lost; metrics go only to metrics.jsonl\n"


@pytest.mark.parametrize(("status", "exit_code"), [("success", 0), ("failed", 1)])
def test_closing_ends_the_run(loggers: Any, status: str, exit_code: int) -> None:
    run = StubRun()
    close(loggers(run, online=True), status)
    assert run.exit_codes == [exit_code]


def test_closing_tells_how_to_upload_the_rest(
    loggers: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    close(loggers(StubRun(failing=TimeoutError("Timed out finishing run.")), online=True))
    assert capsys.readouterr().err == (
        "wandb: Timed out finishing run; "
        "upload the rest with: wandb sync '/somewhere else/wandb/run-1'\n"
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


# -- the log of rows


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.jsonl"


def test_rows_are_lines_with_the_keys_that_they_have(path: Path) -> None:
    logger = MetricsFile(path)
    logger.log_metrics({"load": [0.25, 0.75]}, step=4)
    logger.log_metrics({"loss": 1.5}, step=5)
    assert path.read_text() == '{"step": 4, "load": [0.25, 0.75]}\n{"step": 5, "loss": 1.5}\n'


def test_of_several_ranks_the_first_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = MetricsFile(path)

    logger.log_metrics({"loss": 1.0}, step=2)
    logger.save()
    logger.finalize("success")

    assert not path.exists()
    assert logger.file.is_complete


def test_saved_rows_are_on_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is made after them, and knows how many there are."""
    logger = MetricsFile(path)
    logger.log_metrics({"loss": 1.0}, step=2)
    logger.log_metrics({"loss": 2.0}, step=4)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))

    logger.save()

    assert synced == [path.stat().st_size]
