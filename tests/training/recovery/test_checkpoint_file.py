"""Checkpoints: written atomically, compared with their checksum, read without running code."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn.training.recovery.checkpoint_file import (
    CheckpointError,
    read_checkpoint,
    verify,
    write_checkpoint,
)

VALUES: dict[str, Any] = {
    "large": torch.zeros(300_000),  # more than the megabyte that is read at once
    "weights": torch.arange(6.0).view(2, 3),
    "half": torch.ones(3, dtype=torch.bfloat16),
    "plain": {"step": 3, "names": ["a", "b"], "pair": (1, 2.5), "none": None},
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A good checkpoint."""
    path = tmp_path / "checkpoints" / "step_00000001.ckpt"
    write_checkpoint(VALUES, path)
    return path


class Hostile:
    """An object that makes a file when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.marker}'",)


def test_a_checkpoint_is_read_as_it_was_written(path: Path) -> None:
    verify(path)
    values = read_checkpoint(path)

    assert values["plain"] == VALUES["plain"]
    for name in ("weights", "half", "large"):
        assert torch.equal(values[name], VALUES[name])
        assert values[name].dtype == VALUES[name].dtype


def test_torch_and_zip_read_it_too(path: Path) -> None:
    assert torch.equal(torch.load(path, weights_only=True)["weights"], VALUES["weights"])
    assert zipfile.ZipFile(path).testzip() is None


def test_a_flipped_bit_anywhere_is_noticed(path: Path) -> None:
    good = path.read_bytes()
    places = range(0, len(good), len(good) // 15)
    # All of the end: the comment of the archive, which begins with its own length.
    for place in [*places, *range(len(good) - 90, len(good))]:
        damaged = bytearray(good)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        for read in (read_checkpoint, verify):
            with pytest.raises(CheckpointError, match=r"checksum|cut short"):
                read(path)


@pytest.mark.parametrize("cut", [0.01, 0.5, 0.99])
def test_a_truncated_file_is_rejected(path: Path, cut: float) -> None:
    os.truncate(path, int(path.stat().st_size * cut))
    with pytest.raises(CheckpointError, match=r"^does not end in its checksum: it was cut short"):
        read_checkpoint(path)


def test_an_empty_file_is_rejected(path: Path) -> None:
    path.write_bytes(b"")
    with pytest.raises(CheckpointError, match=r"^is empty$"):
        read_checkpoint(path)


@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("missing", "cannot be read (No such file or directory)"),
        ("a folder", "cannot be read (not a file, but a folder)"),
        ("a pipe", "cannot be read (not a file, but a pipe)"),
    ],
)
def test_anything_but_a_file_is_rejected_without_waiting(
    path: Path, kind: str, problem: str
) -> None:
    path.unlink()
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)

    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)

    assert str(caught.value) == problem


def test_code_in_it_is_not_run(path: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Hostile(marker)))
    assert marker.exists()
    marker.unlink()
    write_checkpoint({"weights": Hostile(marker)}, path)

    verify(path)
    with pytest.raises(CheckpointError, match=r"^is not a checkpoint of tensors and plain values$"):
        read_checkpoint(path)

    assert not marker.exists()


def test_a_full_disk_keeps_the_checkpoint_before(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    before = path.read_bytes()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    for room in (0, 1000, 20_000, 40_000):
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, hard))
        try:
            with pytest.raises(OSError, match="File too large"):
                write_checkpoint({"weights": torch.zeros(100, 128)}, path)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    assert path.read_bytes() == before
    assert [found.name for found in path.parent.iterdir()] == [path.name]


def test_other_errors_are_raised(path: Path) -> None:
    anything: Any = {"function": lambda: None}
    with pytest.raises((AttributeError, pickle.PicklingError)):
        write_checkpoint(anything, path)
    assert read_checkpoint(path)["plain"] == VALUES["plain"]
