"""`metrics.csv`, on good disks and bad ones."""

from __future__ import annotations

import csv
import os
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.utilities import rank_zero_only

from moe_ffn.training.monitoring import metrics_file
from moe_ffn.training.monitoring.metrics_file import (
    MetricsFile,
    columns,
    cut_rows,
    num_damaged,
    read_rows,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "metrics.csv"


def test_a_list_is_one_column_per_expert() -> None:
    assert columns({"train/loss": 2.5, "routing/layer_03/load": [0.25, 0.75]}) == {
        "train/loss": 2.5,
        "routing/layer_03/load/expert_00": 0.25,
        "routing/layer_03/load/expert_01": 0.75,
    }


def test_a_row_without_lists_is_as_it_was() -> None:
    row = {"train/loss": 2.5, "routing/layer_03/load/expert_00": 0.25}

    assert columns(row) == row


def test_rows_with_new_columns(path: Path) -> None:
    logger = MetricsFile(path)
    logger.log_metrics({"load": [0.25, 0.75]}, step=4)
    logger.log_metrics({"loss": 1.5}, step=5)
    logger.log_metrics({"loss": 1.25}, step=6)

    with path.open() as file:
        assert list(csv.DictReader(file)) == [
            {"step": "4", "load/expert_00": "0.25", "load/expert_01": "0.75", "loss": ""},
            {"step": "5", "load/expert_00": "", "load/expert_01": "", "loss": "1.5"},
            {"step": "6", "load/expert_00": "", "load/expert_01": "", "loss": "1.25"},
        ]


def test_a_resumed_run_goes_on_after_its_step(path: Path) -> None:
    before = MetricsFile(path)
    for step in (2, 4, 6):
        before.log_metrics({"loss": step / 10}, step=step)
    with path.open("a") as file:
        file.write("8,0.")  # the process died within a line

    cut_rows(path, 4, validated_step=4)
    MetricsFile(path).log_metrics({"loss": 0.61}, step=6)

    assert read_rows(path) == [
        {"step": "2", "loss": "0.2"},
        {"step": "4", "loss": "0.4"},
        {"step": "6", "loss": "0.61"},
    ]


def test_going_back_to_the_start_leaves_no_file(path: Path) -> None:
    MetricsFile(path).log_metrics({"loss": 1.0}, step=2)

    cut_rows(path, 0, validated_step=-1)
    cut_rows(path, 0, validated_step=-1)

    assert not path.exists()


def test_what_a_full_disk_does_not_take_is_written_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = MetricsFile(path)
    logger.log_metrics({"loss": 1.0}, step=2)
    whole = path.read_text()

    class FullDisk:
        """Takes a part of what is written, as a disk does that becomes full."""

        def __init__(self, file: Any) -> None:
            self.file = file

        def __enter__(self) -> FullDisk:
            return self

        def __exit__(self, *exception: object) -> None:
            self.file.close()

        def write(self, lines: bytes) -> None:
            self.file.write(lines[:3])
            self.file.flush()
            raise OSError(28, "No space left on device")

        def truncate(self, size: int) -> None:
            self.file.truncate(size)

    opening = metrics_file.open_file
    with monkeypatch.context() as patch:
        patch.setattr(metrics_file, "open_file", lambda *given: FullDisk(opening(*given)))
        logger.log_metrics({"loss": 2.0}, step=4)
        logger.log_metrics({"loss": 3.0}, step=6)
    assert path.read_text() == whole, "half a line is no row"
    assert not logger.is_complete

    logger.log_metrics({"loss": 4.0}, step=8)

    assert logger.is_complete

    assert [row["loss"] for row in read_rows(path)] == ["1.0", "2.0", "3.0", "4.0"]
    assert capsys.readouterr().err.splitlines() == [
        f"disk: '{path}' cannot be written (No space left on device); training goes on and tries again",
        f"disk: '{path}' is written again",
    ]


@pytest.mark.parametrize("num_taken", [0, 1, 2])
def test_rows_that_a_failing_disk_has_taken_are_not_written_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch, num_taken: int
) -> None:
    logger = MetricsFile(path)
    logger.log_metrics({"loss": 1.0}, step=2)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr(logger, "_append", fail)
        logger.log_metrics({"loss": 2.0}, step=4)
        logger.log_metrics({"loss": 3.0}, step=6)
    with path.open("a") as file:  # what it took before it failed, and could not be cut off again
        file.write("".join(["4,2.0\n", "6,3.0\n"][:num_taken]) + "6,3")

    logger.log_metrics({"loss": 4.0}, step=8)

    assert path.read_text() == "step,loss\n2,1.0\n4,2.0\n6,3.0\n8,4.0\n"


def test_a_folder_that_was_removed_is_made_again(path: Path) -> None:
    logger = MetricsFile(path)
    logger.log_metrics({"loss": 1.0}, step=2)
    path.unlink()
    path.parent.rmdir()

    logger.log_metrics({"loss": 2.0}, step=4)

    assert read_rows(path) == [{"step": "4", "loss": "2.0"}]


def test_what_somebody_else_did_to_the_file_spoils_no_row(path: Path) -> None:
    logger = MetricsFile(path)
    logger.log_metrics({"loss": 1.0}, step=2)
    with path.open("a") as file:
        file.write("4,half a li")

    logger.log_metrics({"loss": 2.0}, step=4)

    assert path.read_text() == "step,loss\n2,1.0\n4,2.0\n"


def test_of_several_ranks_the_first_writes(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger = MetricsFile(path)

    logger.log_metrics({"loss": 1.0}, step=2)
    logger.save()
    logger.finalize("success")

    assert not path.exists()
    assert logger.is_complete


def test_saved_rows_are_on_the_disk(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A checkpoint is made after them, and knows how many there are."""
    logger = MetricsFile(path)
    logger.log_metrics({"loss": 1.0}, step=2)
    logger.log_metrics({"loss": 2.0}, step=4)
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda file: synced.append(os.fstat(file).st_size))

    logger.save()

    assert synced == [path.stat().st_size]


DAMAGES = {
    "bytes": b"\xff\x00,1.0",
    "a cell less": b"6",
    "a cell more": b"6,1.0,2.0",
    "no number": b"6,1.O",
    "no step": b",1.0",
    "a quotation mark": b'6,"1.0',
    "a cell without end": b"6," + b"9" * 200_000,
    "empty": b"",
}


@pytest.mark.parametrize("line", DAMAGES.values(), ids=DAMAGES)
def test_lines_that_are_no_rows_are_counted_and_left_out(path: Path, line: bytes) -> None:
    logger = MetricsFile(path)
    for step in (2, 4):
        logger.log_metrics({"loss": 1.5}, step=step)
    good = path.read_text()
    with path.open("ab") as file:
        file.write(line + b"\n8,1.25\n")

    assert num_damaged(path) == 1
    assert [row["step"] for row in read_rows(path)] == ["2", "4", "8"]
    cut_rows(path, 4, validated_step=4)
    assert path.read_text() == good


@pytest.mark.parametrize("header", [b"stop,loss", b"\xff", b'"', b"[" * 200_000])
def test_under_a_damaged_header_nothing_can_be_read(path: Path, header: bytes) -> None:
    path.parent.mkdir()
    path.write_bytes(header + b"\n2,1.5\n4,1.5\n")

    assert read_rows(path) == []
    assert num_damaged(path) == 3


def test_without_a_file_nothing_is_damaged(path: Path) -> None:
    assert num_damaged(path) == 0
    MetricsFile(path).log_metrics({"loss": float("nan"), "other": None}, step=2)
    assert num_damaged(path) == 0
