"""Logs of one JSON object a line, on good disks and bad ones."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_ffn.training.monitoring.json_lines import (
    JsonLines,
    Line,
    Row,
    cut_lines,
    num_damaged,
    read_lines,
)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "alarms.jsonl"


def steps(path: Path) -> list[int]:
    return [line.step for line in read_lines(path, Line)]


def text(*found: int) -> str:
    return "".join(f'{{"step": {step}}}\n' for step in found)


def test_the_file_appears_with_the_first_object(path: Path) -> None:
    file = JsonLines(path)
    file.add([])
    assert not path.parent.exists()

    file.add([{"step": 1}, {"step": 2}])
    file.add([{"step": 3}])

    assert path.read_text() == text(1, 2, 3)


def test_lines_are_appended(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The growing log is never rewritten, even when a line has new keys."""
    file = JsonLines(path)
    file.add([{"step": 1}])
    identity = path.stat().st_ino
    written: list[int] = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: written.append(len(data)) or write(fd, data))

    for step in (2, 3, 4):
        file.add([{"step": step, f"key {step}": [0.5, 1.5]}])

    assert path.stat().st_ino == identity
    assert sum(written) == path.stat().st_size - len(text(1))
    assert steps(path) == [1, 2, 3, 4]


FULL = OSError(errno.ENOSPC, "No space left on device")


def fail(*_: object) -> int:
    raise FULL


def take_three_bytes() -> Callable[[int, bytes], int]:
    """A disk that becomes full in the middle of a line."""
    write, is_full = os.write, [False]

    def half(descriptor: int, data: bytes) -> int:
        if is_full[0]:
            raise FULL
        is_full[0] = True
        return write(descriptor, bytes(data[:3]))

    return half


@pytest.mark.parametrize(
    ("name", "failing"),
    [("fsync", lambda: fail), ("write", take_three_bytes), ("write", lambda: fail)],
    ids=["not synced", "half a line", "nothing"],
)
def test_lines_that_a_full_disk_rejects_are_written_later(
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    failing: Callable[[], Callable[..., int]],
) -> None:
    file = JsonLines(path)
    file.add([{"step": 1}])

    for step in (2, 3):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, failing())
            file.add([{"step": step}])
        assert path.read_text() == text(1), "half a line is none"
    assert not file.is_complete

    file.add([{"step": 4}])

    assert file.is_complete
    assert path.read_text() == text(1, 2, 3, 4)


@pytest.mark.parametrize("num_taken", [0, 1, 2])
def test_lines_that_a_failing_disk_has_taken_are_not_written_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch, num_taken: int
) -> None:
    """The disk writes some lines, fails, and then rejects truncation too."""
    file = JsonLines(path)
    file.add([{"step": 1}])
    write = os.write
    taken = text(2, 3, 3)[: num_taken * len(text(2)) + 4].encode()

    def take_some(descriptor: int, data: bytes) -> int:
        write(descriptor, taken)
        raise FULL

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", take_some)
        patch.setattr(os, "truncate", fail)
        file.add([{"step": 2}, {"step": 3}])
    assert path.read_bytes() == text(1).encode() + taken

    file.add([{"step": 4}])

    assert path.read_text() == text(1, 2, 3, 4)


@pytest.mark.parametrize("what", ["the file", "its folder"])
def test_lines_that_only_could_not_be_synced_are_not_written_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    file = JsonLines(path)
    with monkeypatch.context() as patch:
        if what == "the file":
            patch.setattr(os, "fsync", fail)
            patch.setattr(os, "truncate", fail)
        else:
            patch.setattr("moe_ffn.training.monitoring.json_lines.sync_folder", fail)
        file.add([{"step": 4}])
    assert steps(path) == [4]
    file.add([{"step": 6}])

    assert file.is_complete
    assert steps(path) == [4, 6]


def test_a_removed_folder_is_recreated(path: Path) -> None:
    file = JsonLines(path)
    file.add([{"step": 2}])
    path.unlink()
    path.parent.rmdir()

    file.add([{"step": 4}])

    assert path.read_text() == text(4)


def test_after_half_a_line_of_a_process_that_died_another_begins(path: Path) -> None:
    JsonLines(path).add([{"step": 2}])
    with path.open("a") as file:
        file.write('{"step": 4')
    JsonLines(path).add([{"step": 4}])
    assert path.read_text() == text(2, 4)


@pytest.mark.parametrize("is_synced", [True, False])
def test_lines_are_synced_by_add_or_by_sync(
    path: Path, monkeypatch: pytest.MonkeyPatch, is_synced: bool
) -> None:
    file = JsonLines(path, is_synced=is_synced)
    file.add([{"step": 2}])
    synced: list[int] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.fstat(fd).st_size))

    file.add([{"step": 4}])
    assert synced == ([path.stat().st_size] if is_synced else [])

    file.sync()
    assert synced[-1:] == [path.stat().st_size]


def test_lines_after_a_step_are_cut(path: Path) -> None:
    JsonLines(path).add([{"step": step} for step in (2, 4, 6)])
    with path.open("a") as file:
        file.write('{"step": 8')  # the process died within a line

    cut_lines(path, Line, lambda line: line.step <= 4)
    assert path.read_text() == text(2, 4)

    cut_lines(path, Line, lambda line: False)
    cut_lines(path, Line, lambda line: False)
    assert not path.exists()
    assert num_damaged(path, Line) == 0


DAMAGES = {
    "bytes": b"\xff\xfe\x00",
    "half": b"{",
    "a step of text": b'{"step": "4"}',
    "a number without end": b'{"step": ' + b"9" * 200_000 + b"}",
    "nested": b"[" * 100_000,
    "a loss of text": b'{"step": 6, "loss": "low"}',
}


@pytest.mark.parametrize("line", DAMAGES.values(), ids=DAMAGES)
def test_damaged_lines_are_counted_and_left_out(path: Path, line: bytes) -> None:
    JsonLines(path).add([{"step": 2}, {"step": 4}])
    with path.open("ab") as file:
        file.write(line + b'\n{"step": 8}\n')

    assert num_damaged(path, Row) == 1
    assert [value.step for value in read_lines(path, Row)] == [2, 4, 8]
    cut_lines(path, Row, lambda value: value.step <= 4)
    assert path.read_text() == text(2, 4)


def test_a_row_may_hold_nonfinite_numbers(path: Path) -> None:
    values = {"loss": float("nan"), "other": None, "load": [float("inf"), None]}
    JsonLines(path).add([{"step": 2, **values}])
    (row,) = read_lines(path, Row)
    assert num_damaged(path, Row) == 0
    assert str(dict(row.values)) == str(values)
