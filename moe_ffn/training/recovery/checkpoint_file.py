"""One checkpoint on a disk: whole or not there, and never read when it is not what was written.

The file is an archive of `torch.save`. Its comment, the last bytes of any zip archive, holds the optimizer
step and the SHA-256 of all that stands before, so that one rename puts everything in its place, the step is
known without reading the weights, and `torch.load` and `unzip` read it still. Tensors that are sharded over
ranks are in a folder beside it; see `checkpoint_shards`.
"""

from __future__ import annotations

import hashlib
import os
import re
import struct
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from itertools import chain, count
from pathlib import Path
from typing import Any, BinaryIO

import torch
import torch.distributed as dist

from moe_ffn.config.base import MAX_COUNT
from moe_ffn.files import kind_of, make_folder, open_file, reason, replacing
from moe_ffn.training.recovery.checkpoint_shards import (
    FOLDER,
    SHARDS,
    CheckpointError,
    is_sharded,
    read_shards,
    remove_shards_except,
    verify_shards,
    write_shards,
)

IDENTITY = "identity"
"""The key of what a run has to agree with to go on from a checkpoint."""

_ADVICE = re.compile(r"^Weights only load failed|weights_only")
"""Lines in which torch says how to load a file all the same."""

_ARCHIVE = b"PK\3\4"
"""The first bytes of every file that `torch.save` writes, and the sign by which `torch.load` knows it."""

_COMMENT = re.compile(
    rb"(?:shards:(?P<shards>%s) )?(?:step:(?=.{10} )(?P<step> *[0-9]+) )?sha256:[0-9a-f]{64}\Z"
    % FOLDER.pattern.encode()
)
_MAX_COMMENT_BYTES = 200
_LABEL = b"sha256:"
_SEAL_BYTES = len(_LABEL) + hashlib.sha256().digest_size * 2
_NO_COMMENT = struct.pack("<H", 0)


def write_checkpoint(values: dict[str, Any], path: Path) -> None:
    """Put `values` in the place of `path`, and return when they are on the disk.

    Where they hold tensors that are sharded over ranks, every rank has to call this.

    Raises:
        OSError: they cannot be written; `path` is what it was before.
    """
    if is_sharded(values):
        values = write_shards(values, path.parent)
        if dist.get_rank() != 0:
            return
    make_folder(path.parent)
    with replacing(path) as file:
        try:
            torch.save(values, file)
        except RuntimeError as error:  # what torch makes of a full disk
            if isinstance(error.__context__, OSError):
                raise error.__context__ from error
            raise
        _seal(file, values.get("global_step"), values.get(SHARDS))


def read_checkpoint(path: Path) -> dict[str, Any]:
    """What was written to `path`, on the CPU; tensors in shards are `SavedTensors`. Runs no code in it.

    Raises:
        CheckpointError: it cannot be read, or is not what was written.
    """
    with _explaining():
        values = _in_file(path)
        return read_shards(values, path.parent) if SHARDS in values else values


def verify(path: Path) -> None:
    """Read a file, and its shards, against their checksums.

    Raises:
        CheckpointError: one does not match, or cannot be read.
    """
    with _explaining():
        with _open(path) as file:
            _require_seal(file)
            shards, _ = _labels(file)
        if shards:
            verify_shards(_in_file(path), path.parent)


def step_inside(path: Path) -> int | None:
    """The optimizer step of a checkpoint, read without the rest; None where it has none.

    Whether the rest of the file is good is not looked at.
    """
    try:
        with _open(path) as file:
            return _labels(file)[1]
    except (CheckpointError, OSError):
        return None


def remove_unused_shards(folder: Path) -> None:
    """Remove the shards that no checkpoint in `folder` names, whatever that is called."""
    with suppress(OSError):
        entries = list(folder.iterdir())
        if not any(FOLDER.fullmatch(path.name) for path in entries):
            return
        used: list[str | None] = []
        for path in entries:
            if kind_of(path) == "a file":
                with _open(path) as file:
                    used.append(_labels(file)[0])
        remove_shards_except(folder, used)


@contextmanager
def _explaining() -> Iterator[None]:
    """Whatever is wrong with a checkpoint is a CheckpointError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of a pickle that is refused in the next moment
            yield
    except OSError as error:
        raise CheckpointError(f"cannot be read ({reason(error)})") from error
    except (CheckpointError, MemoryError):
        raise
    except Exception as error:  # of many kinds: pickle's, zip's, torch's
        raise CheckpointError(
            f"is no checkpoint of tensors and plain values ({_why(error)})"
        ) from error


def _in_file(path: Path) -> dict[str, Any]:
    """The values in a file that matches its checksum; of tensors that are in shards the shapes."""
    with _open(path) as file:
        _require_seal(file)
        shards, step = _labels(file)
        file.seek(0)
        # Of anything else `torch.load` would guess what it is, and it has advice on loading each.
        if file.read(len(_ARCHIVE)) != _ARCHIVE:
            raise ValueError("no archive of torch.save")
        file.seek(0)
        values = torch.load(file, map_location="cpu", weights_only=True)
    if not isinstance(values, dict):
        raise CheckpointError(f"holds a {type(values).__name__}, not the state of a run")
    if step is not None and step != values.get("global_step"):
        raise CheckpointError(f"says that it is of step {step}, and holds another")
    if shards is not None and SHARDS not in values:
        raise CheckpointError(f"says that its tensors are in '{shards}', and does not know them")
    return values


def _labels(file: BinaryIO) -> tuple[str | None, int | None]:
    """The folder with the shards of a checkpoint, and its optimizer step, as its comment says."""
    size = file.seek(0, 2)
    file.seek(max(size - _MAX_COMMENT_BYTES, 0))
    found = _COMMENT.search(file.read())
    if found is None:
        return None, None
    shards, step = found["shards"], found["step"]
    return None if shards is None else shards.decode(), None if step is None else int(step)


def _why(error: Exception) -> str:
    """What torch found wrong with a file, without its advice to load it all the same."""
    lines = [line.strip() for line in str(error).splitlines() if not _ADVICE.search(line)]
    found = next(filter(None, lines), type(error).__name__)
    return found.removeprefix("WeightsUnpickler error: ").partition(" Please use ")[0]


def _open(path: Path) -> BinaryIO:
    if (kind := kind_of(path)) not in (None, "a file"):
        raise CheckpointError(f"is no file, but {kind}")
    return open_file(path)


def _seal(file: BinaryIO, step: Any, shards: Any) -> None:
    """Write the step, the shards and the digest of all there is into the comment of the archive."""
    has_step = type(step) is int and 0 <= step <= MAX_COUNT
    label = b"step:%10d " % step if has_step else b""
    if shards:
        label = b"shards:%s " % shards["folder"].encode() + label
    file.seek(-len(_NO_COMMENT), 2)
    if file.read() != _NO_COMMENT:
        raise RuntimeError("torch.save wrote an archive that does not end in an empty comment")
    file.seek(-len(_NO_COMMENT), 2)
    file.write(struct.pack("<H", len(label) + _SEAL_BYTES) + label)
    digest = _digest(file, file.tell())
    file.write(_LABEL + digest)


def _require_seal(file: BinaryIO) -> None:
    """CheckpointError unless a file matches its checksum; it is at its beginning then."""
    size = file.seek(0, 2)
    if size == 0:
        raise CheckpointError("is empty")
    file.seek(max(size - _SEAL_BYTES, 0))
    seal = file.read()
    if not seal.startswith(_LABEL):
        raise CheckpointError("does not end in its checksum: it was cut short, or is no checkpoint")
    if seal != _LABEL + _digest(file, size - len(seal)):
        raise CheckpointError("does not match its checksum: it was damaged")
    file.seek(0)


def _digest(file: BinaryIO, size: int) -> bytes:
    """SHA-256 of the first `size` bytes, in hexadecimal; leaves the file behind them."""
    digest = hashlib.sha256()
    file.seek(0)
    while size:
        block = file.read(min(size, 1 << 20))
        if not block:
            raise CheckpointError("was cut short while it was read")
        digest.update(block)
        size -= len(block)
    return digest.hexdigest().encode()


# -- names


BEST_NAME = "best.ckpt"
"""The weights of the lowest validation loss, without what a run needs to go on."""

_STEP_NAME = re.compile(r"step_([0-9]{8,})\.ckpt")


def step_name(step: int) -> str:
    return f"step_{step:08d}.ckpt"


def step_of(path: Path) -> int:
    """The optimizer step that a checkpoint's name says."""
    match = _STEP_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def likely_step(path: Path) -> int:
    """The step inside, or of a file that cannot be read the one in its name."""
    step = step_inside(path)
    return step_of(path) if step is None else step


def is_misnamed(path: Path, step: int) -> bool:
    """Whether the name of a checkpoint of `step` says another."""
    return path.name != step_name(step)


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints, good or not, newest step first; empty where there is no folder.

    Of two of one step the one that is named by it is first.

    Raises:
        OSError: the folder cannot be read.
    """

    def rank(path: Path) -> tuple[int, bool, str]:
        step = likely_step(path)
        return step, not is_misnamed(path, step), path.name

    if kind_of(folder) is None:
        return []
    found = [path for path in folder.iterdir() if _STEP_NAME.fullmatch(path.name)]
    return sorted(found, key=rank, reverse=True)


def pass_over(path: Path, name: str | None = None) -> Path:
    """Give a checkpoint a name under which none is looked for; nothing is written over.

    Args:
        name: what it was called; its own name by default.
    """
    stem = f"{(name or path.name)[:200]}.passed-over"  # file systems take 255
    names = chain([stem], (f"{stem}-{number}" for number in count(2)))
    return path.rename(_first_free(path.parent, names))


def fix_names(folder: Path) -> list[tuple[str, str]]:
    """Name every good checkpoint by the step inside it.

    At any moment each has the name of some step, so that a process that dies in between leaves nothing in
    doubt. Of two of one step the second of `newest_first` is passed over.

    Returns:
        the names of those that were misnamed, before and now.

    Raises:
        OSError: a file cannot be renamed.
    """
    waiting: list[tuple[str, Path, int]] = []
    for path in newest_first(folder):
        step = _good_step(path)
        if step is not None and is_misnamed(path, step):
            # Steps that no run comes to.
            free = _first_free(folder, (step_name(number) for number in count(MAX_COUNT + 1)))
            waiting.append((path.name, path.rename(free), step))
    renamed: list[tuple[str, str]] = []
    for name, path, step in waiting:
        place = folder / step_name(step)
        if os.path.lexists(place) and _good_step(place) != step:
            pass_over(place)  # damaged, or it would be waiting too
        now = pass_over(path, name) if os.path.lexists(place) else path.rename(place)
        renamed.append((name, now.name))
    return renamed


def _good_step(path: Path) -> int | None:
    """The step inside a checkpoint that matches its checksum."""
    try:
        verify(path)
    except (CheckpointError, OSError):
        return None
    return step_inside(path)


def _first_free(folder: Path, names: Iterable[str]) -> Path:
    return next(path for name in names if not os.path.lexists(path := folder / name))
