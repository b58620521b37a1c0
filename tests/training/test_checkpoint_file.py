"""A checkpoint is read as it was written, or not at all."""

from __future__ import annotations

import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn.training.checkpoint_file import (
    CheckpointError,
    read_checkpoint,
    verify,
    write_checkpoint,
)

VALUES: dict[str, Any] = {
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
    """Whoever unpickles it makes a file."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch '{self.marker}'",)


def test_what_was_written_is_read(path: Path) -> None:
    verify(path)
    values = read_checkpoint(path)

    assert values["plain"] == VALUES["plain"]
    for name in ("weights", "half"):
        assert torch.equal(values[name], VALUES[name])
        assert values[name].dtype == VALUES[name].dtype


def test_other_programs_read_it_too(path: Path) -> None:
    assert torch.equal(torch.load(path, weights_only=True)["weights"], VALUES["weights"])
    assert zipfile.ZipFile(path).testzip() is None


def test_every_bit_counts(path: Path) -> None:
    good = path.read_bytes()
    places = range(0, len(good), max(len(good) // 200, 1))
    for place in [*places, len(good) - 1]:
        damaged = bytearray(good)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"checksum|cut short"):
            read_checkpoint(path)
        with pytest.raises(CheckpointError, match=r"checksum|cut short"):
            verify(path)


@pytest.mark.parametrize("cut", [0.01, 0.5, 0.99])
def test_a_part_of_it_is_refused(path: Path, cut: float) -> None:
    os.truncate(path, int(path.stat().st_size * cut))

    with pytest.raises(CheckpointError, match=r"^does not end in its checksum: it was cut short"):
        read_checkpoint(path)


def test_an_empty_file_is_refused(path: Path) -> None:
    path.write_bytes(b"")

    with pytest.raises(CheckpointError, match=r"^is empty$"):
        read_checkpoint(path)


@pytest.mark.parametrize("how", ["missing", "a folder", "a pipe"])
def test_what_is_no_file_is_refused_without_waiting(path: Path, how: str) -> None:
    path.unlink()
    if how == "a folder":
        path.mkdir()
    elif how == "a pipe":
        os.mkfifo(path)

    answer = "cannot be read .No such file" if how == "missing" else "is no file"
    with pytest.raises(CheckpointError, match=f"^{answer}"):
        read_checkpoint(path)


def test_code_is_not_run_not_even_under_a_seal(path: Path, tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Hostile(marker)))
    assert marker.exists()
    marker.unlink()
    write_checkpoint({"weights": Hostile(marker)}, path)

    verify(path)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)

    assert not marker.exists()
    assert "GLOBAL posix.system" in str(caught.value)
    assert "weights_only" not in str(caught.value), "torch advises to load it all the same"
    assert "\n" not in str(caught.value)


def test_a_disk_with_too_little_room_leaves_the_one_before(
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


def test_an_error_that_is_not_the_disk_s_is_not_hidden(path: Path) -> None:
    anything: Any = {"function": lambda: None}

    with pytest.raises((AttributeError, pickle.PicklingError)):
        write_checkpoint(anything, path)

    assert read_checkpoint(path)["plain"] == VALUES["plain"]
