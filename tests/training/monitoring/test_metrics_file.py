"""Lightning's logger over `metrics.jsonl`."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from lightning.pytorch.utilities import rank_zero_only

from moe_ffn.training.monitoring.metrics_file import MetricsFile


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
