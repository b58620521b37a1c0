"""A checkpoint is read as it was written, or not at all."""

from __future__ import annotations

import hashlib
import io
import os
import pickle
import tarfile
import zipfile
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn.training.recovery.checkpoint_file import (
    CheckpointError,
    read_checkpoint,
    step_inside,
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
    # All of the end, where the comment of the archive, the seal, begins with its own length.
    for place in [*places, *range(len(good) - 120, len(good))]:
        damaged = bytearray(good)
        damaged[place] ^= 1 << place % 8
        path.write_bytes(damaged)
        with pytest.raises(CheckpointError, match=r"checksum|cut short"):
            read_checkpoint(path)
        with pytest.raises(CheckpointError, match=r"checksum|cut short"):
            verify(path)


@pytest.mark.parametrize("place", [0.4, 0.6, 0.9])
def test_every_part_of_a_large_one_counts(path: Path, place: float) -> None:
    """More than the megabyte that is read at once; in a tensor, where nothing else would notice."""
    write_checkpoint({"weights": torch.zeros(800_000)}, path)
    verify(path)
    with path.open("r+b") as file:
        file.seek(int(path.stat().st_size * place))
        file.write(b"\x01")

    with pytest.raises(CheckpointError, match=r"^does not match its checksum: it was damaged$"):
        verify(path)
    with pytest.raises(CheckpointError, match=r"^does not match its checksum: it was damaged$"):
        read_checkpoint(path)


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


def _saved(values: Any, **options: Any) -> bytes:
    file = io.BytesIO()
    torch.save(values, file, **options)
    return file.getvalue()


def _tar() -> bytes:
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        archive.addfile(tarfile.TarInfo("pickle"))
    return file.getvalue()


def _archive_of_a_pickle() -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps({"step": 3}, protocol=4))
        archive.writestr("archive/version", "3\n")
    return file.getvalue()


NO_ARCHIVE = "no archive of torch.save"
STRANGE: dict[str, tuple[Callable[[], bytes], str]] = {
    "a pickle": (lambda: pickle.dumps({"step": 3}), NO_ARCHIVE),
    "a pickle as text": (lambda: pickle.dumps({"step": 3}, protocol=0), NO_ARCHIVE),
    "of an old torch": (lambda: _saved(VALUES, _use_new_zipfile_serialization=False), NO_ARCHIVE),
    "of a very old torch": (_tar, NO_ARCHIVE),
    "no file of torch": (lambda: b"hello", NO_ARCHIVE),
    "nothing": (lambda: b"", NO_ARCHIVE),
    "a pickle in an archive": (_archive_of_a_pickle, "Unsupported operand 149"),
    "an object": (
        lambda: _saved({"x": Fraction(1)}),
        "Unsupported global: GLOBAL fractions.Fraction was not an allowed global by default.",
    ),
}


@pytest.mark.parametrize("content", STRANGE)
def test_what_we_did_not_write_is_refused_without_advice_to_load_it(
    path: Path, content: str
) -> None:
    make, what = STRANGE[content]
    found = make()
    path.write_bytes(found + b"sha256:" + hashlib.sha256(found).hexdigest().encode())

    verify(path)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)

    assert str(caught.value) == f"is no checkpoint of tensors and plain values ({what})"


def test_the_step_beside_the_checksum_has_to_be_that_of_the_values(path: Path) -> None:
    write_checkpoint({"global_step": 12}, path)
    assert step_inside(path) == read_checkpoint(path)["global_step"] == 12

    found = path.read_bytes()[:-71].replace(b"step:        12", b"step:        13")
    path.write_bytes(found + b"sha256:" + hashlib.sha256(found).hexdigest().encode())

    assert step_inside(path) == 13
    with pytest.raises(CheckpointError, match=r"^says that it is of step 13, and holds another"):
        read_checkpoint(path)


def test_a_step_with_any_bit_flipped_is_read_as_a_number_or_as_none(path: Path) -> None:
    write_checkpoint({"global_step": 1007}, path)
    good = path.read_bytes()
    start = good.rindex(b"step:      1007 ")
    for place in range(start, start + len(b"step:      1007 ")):
        for bit in range(8):
            damaged = bytearray(good)
            damaged[place] ^= 1 << bit
            path.write_bytes(damaged)

            found = step_inside(path)
            assert found is None or found == int(damaged[start + 5 : start + 15])


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
