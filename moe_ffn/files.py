"""Files that are either whole or not there."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

UNFINISHED = ".unfinished"
"""How the name of a file ends that is being written, or was when its process died."""

_NO_SUCH_THING = {errno.EINVAL, errno.ENOTSUP}
"""What file systems answer that cannot sync a folder."""


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write and to read, beside `path`; it takes the place of `path` when the block ends.

    Until then, and after an error or the death of the process, `path` is what it was before. When this
    returns the content is on the disk.
    """
    handle, temporary = tempfile.mkstemp(UNFINISHED, f".{path.name}.", path.parent)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        Path(temporary).chmod(0o644)  # mkstemp keeps others out, who may want to read it
        Path(temporary).replace(path)
    except BaseException:
        with suppress(OSError):
            Path(temporary).unlink()
        raise
    sync_folder(path.parent)


def write_whole(path: Path, content: str | bytes) -> None:
    """Put `content` in the place of `path`; text as UTF-8."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def set_aside(path: Path) -> Path:
    """Keep what is in a damaged file, which is about to be mended, beside it; returns where."""
    kept = path.with_name(f"{path.name}.damaged")
    write_whole(kept, path.read_bytes())
    return kept


def remove_unfinished(folder: Path) -> None:
    """Remove what a process that died left half-written."""
    for path in folder.glob(f".*{UNFINISHED}"):
        with suppress(OSError):
            path.unlink()


def sync_folder(folder: Path) -> None:
    """Return when the names in `folder` are on the disk."""
    if os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _NO_SUCH_THING:
            raise
    finally:
        os.close(descriptor)
