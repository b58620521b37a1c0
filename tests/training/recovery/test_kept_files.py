"""What a run is begun with comes back where somebody removed its folder."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_ffn.training.recovery import checkpoint_keeper
from moe_ffn.training.recovery.checkpoint_keeper import KeptFiles


def test_files_that_are_there_are_left_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.yaml").write_text("mine")

    KeptFiles(tmp_path, {"config.yaml": "theirs"}).put_back()

    assert (tmp_path / "config.yaml").read_text() == "mine"
    assert capsys.readouterr().err == ""


def test_those_that_were_removed_come_back(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    kept = KeptFiles(folder, {"config.yaml": "seed: 1\n", "facts.json": "{}"})

    kept.put_back()
    kept.put_back()

    assert (folder / "config.yaml").read_text() == "seed: 1\n"
    (folder / "config.yaml").write_text("seed: 2\n")
    (folder / "facts.json").unlink()
    kept.put_back()
    assert (folder / "config.yaml").read_text() == "seed: 2\n", (
        "of one that is there nothing is known"
    )
    assert capsys.readouterr().err.splitlines() == [
        f"disk: '{folder}' had lost config.yaml, facts.json; written again",
        f"disk: '{folder}' had lost facts.json; written again",
    ]


def test_a_change_that_the_disk_does_not_take_is_written_with_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = KeptFiles(tmp_path, {"saved.json": "none"})
    kept.put_back()
    capsys.readouterr()

    def fail(folder: Path, name: str, text: str) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as disk:
        disk.setattr(checkpoint_keeper, "write_file", fail)
        kept.change("saved.json", "4")
    assert (tmp_path / "saved.json").read_text() == "none"
    kept.put_back()

    assert (tmp_path / "saved.json").read_text() == "4"
    assert capsys.readouterr().err.splitlines() == [
        f"disk: '{tmp_path}' cannot be written (No space left on device); training goes on and tries again",
        f"disk: '{tmp_path}' is written again",
    ]


@pytest.mark.parametrize("is_first", [True, False])
def test_of_several_ranks_the_first_puts_them_back(tmp_path: Path, is_first: bool) -> None:
    anything: Any = SimpleNamespace(is_global_zero=is_first)
    folder = tmp_path / "run"

    KeptFiles(folder, {"config.yaml": ""}).on_save_checkpoint(anything, anything, {})

    assert (folder / "config.yaml").exists() == is_first


def test_a_disk_that_does_not_take_them_is_said_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    folder.write_text("a file in the place of the folder")
    kept = KeptFiles(folder, {"config.yaml": ""})

    for _ in range(3):
        kept.put_back()

    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"disk: '{folder}' cannot be written (")
