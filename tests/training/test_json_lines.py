"""Files of one JSON object a line, on good disks and bad ones."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe_ffn.training.monitoring.json_lines import JsonLines, cut_lines, num_damaged, read_lines


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "run" / "alarms.jsonl"


def test_the_file_appears_with_the_first_object(path: Path) -> None:
    file = JsonLines(path)
    file.add([])
    assert not path.parent.exists()

    file.add([{"step": 1}, {"step": 2}])
    file.add([{"step": 3}])

    assert path.read_text() == '{"step": 1}\n{"step": 2}\n{"step": 3}\n'


def test_what_a_bad_disk_does_not_take_is_written_later(
    path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = JsonLines(path)
    file.add([{"step": 1}])

    def fail(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", fail)
        file.add([{"step": 2}])
        file.add([{"step": 3}])
    assert read_lines(path) == [{"step": 1}]
    assert not file.is_complete

    file.add([{"step": 4}])

    assert file.is_complete

    assert read_lines(path) == [{"step": step} for step in (1, 2, 3, 4)]
    assert len(capsys.readouterr().err.splitlines()) == 2


def test_a_resumed_run_goes_on_after_its_step(path: Path) -> None:
    JsonLines(path).add([{"step": step} for step in (2, 4, 6)])
    with path.open("a") as file:
        file.write('{"step": 8')  # the process died within a line

    cut_lines(path, 4)
    assert read_lines(path) == [{"step": 2}, {"step": 4}]

    cut_lines(path, 0)
    cut_lines(path, 0)
    assert not path.exists()


@pytest.mark.parametrize(
    "line",
    [b"\xff\xfe\x00", b"{", b"[1]", b'{"step": "4"}', b'{"step": true}', b"[" * 100_000],
    ids=["bytes", "half", "a list", "text", "a boolean", "nested"],
)
def test_lines_that_nobody_can_read_are_counted(path: Path, line: bytes) -> None:
    JsonLines(path).add([{"step": 2}])
    with path.open("ab") as file:
        file.write(line + b"\n")

    assert num_damaged(path) == 1
    assert read_lines(path) == [{"step": 2}]
    cut_lines(path, 9)
    assert path.read_text() == '{"step": 2}\n'


def test_lines_that_a_failing_disk_has_taken_are_not_written_twice(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = JsonLines(path)
    lines.add([{"step": 2}])

    def take_and_fail(place: Path, text: str) -> None:
        place.write_text(text)
        raise OSError(5, "Input/output error")

    with monkeypatch.context() as patch:
        patch.setattr("moe_ffn.training.monitoring.json_lines.write_whole", take_and_fail)
        lines.add([{"step": 4}])

    lines.add([{"step": 6}])

    assert [line["step"] for line in read_lines(path)] == [2, 4, 6]


def test_without_a_file_nothing_is_damaged(path: Path) -> None:
    assert num_damaged(path) == 0
    assert read_lines(path) == []
