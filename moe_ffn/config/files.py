"""Functions that read and write regular files: writes are atomic, reads follow links, pipes raise."""

from __future__ import annotations

import errno
import hashlib
import json
import logging
import os
import secrets
import shutil
import stat
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

try:
    import fcntl
except ImportError:  # Windows
    fcntl = None

log = logging.getLogger(__name__)

UNFINISHED = ".unfinished"
"""Suffix of a file that is being written, or was when its process died."""

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
"""Errors of `stat` for a missing file or a broken link."""

_O_NOFOLLOW = getattr(os, "O_NOFOLLOW", 0)  # Windows lacks it

_FSYNC_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP}
"""Errors of file systems that cannot sync a folder."""


def reason(error: OSError) -> str:
    """Return the system's message without error number and path, such as `No space left on device`."""
    return error.strerror or str(error) or type(error).__name__


def kind_of(path: Path) -> str | None:
    """Return `a file`, `a folder`, `a pipe`, `a socket` or `a device`, links followed; None if absent."""
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode), "a device")
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return None


def open_file(path: Path, mode: Literal["rb", "ab", "r+b"] = "rb") -> BinaryIO:
    """Open a regular file; OSError for anything else. Reading follows links; writing to one fails."""
    _require_file(path)
    no_follow = 0 if mode == "rb" else _O_NOFOLLOW
    return open(path, mode, opener=lambda name, flags: os.open(name, flags | no_follow, 0o666))


def read_bytes(path: Path) -> bytes:
    """Return the content of a regular file; see `open_file`."""
    with open_file(path) as file:
        return file.read()


def sha256_of(path: Path) -> str:
    """Return the SHA-256 of a regular file, in hexadecimal; see `open_file`."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore


def read_text(path: Path, errors: str = "strict") -> str:
    """Return the content of a regular file, decoded from UTF-8, with its line ends."""
    return read_bytes(path).decode("utf-8", errors)


def write_file(folder: Path, name: str, text: str) -> None:
    """Write a file into a folder atomically; `name` may contain subfolders."""
    path = folder / name
    make_folder(path.parent)
    write_atomically(path, text)


def make_folder(path: Path) -> None:
    """Make a folder and its parents unless it exists; OSError if that fails or `path` is not a folder."""
    if (kind := kind_of(path)) not in (None, "a folder"):
        raise OSError(errno.ENOTDIR, f"not a folder, but {kind}", str(path))
    path.mkdir(parents=True, exist_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """Yield a file for writing and reading that replaces `path` when the `with` block ends.

    Until then, and after an error or a killed process, `path` is unchanged. The content is synced to disk
    before it replaces `path`. A link is replaced, not its target. A pipe or a device raises OSError.
    """
    _require_file(path)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with temporary.open("x+b") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with suppress(OSError):
            temporary.unlink()
        raise
    sync_folder(path.parent)


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """Yield a new folder that replaces `path` when the `with` block ends.

    After an error `path` is unchanged. A process that is killed between the two renames leaves the old folder
    as `.NAME.*.old.unfinished`, which `remove_unfinished` restores.
    """
    make_folder(path.parent)
    token = secrets.token_hex(4)
    new, old = (path.with_name(f".{path.name}.{token}{kind}{UNFINISHED}") for kind in ("", ".old"))
    new.mkdir()
    try:
        yield new
        for inner in new.rglob("*"):
            if inner.is_file():
                with inner.open("rb") as file:
                    os.fsync(file.fileno())
            else:
                sync_folder(inner)
        sync_folder(new)
        if path.exists():
            path.rename(old)
        try:
            new.rename(path)
        except OSError:
            if old.exists():
                old.rename(path)
            raise
    except BaseException:
        shutil.rmtree(new, ignore_errors=True)
        raise
    sync_folder(path.parent)
    shutil.rmtree(old, ignore_errors=True)


def split_into_files(sizes: Mapping[str, int], max_bytes: float) -> list[list[str]]:
    """Split names, in order, into files of at most `max_bytes`; a larger entry has its own file."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if files[-1] and filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` as `replacing` does; text as UTF-8."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def remove_unfinished(folder: Path) -> None:
    """Remove the unfinished files of killed processes, and restore a folder that one was replacing."""
    for path in folder.glob(f".*{UNFINISHED}"):
        with suppress(OSError):
            if kind_of(path) != "a folder":
                path.unlink()
                continue
            name, _, kind = path.name.removesuffix(UNFINISHED)[1:].rpartition(".")
            replaced = folder / name.rpartition(".")[0]
            if kind == "old" and not replaced.exists():
                path.rename(replaced)
            else:
                shutil.rmtree(path)


def sync_folder(folder: Path) -> None:
    """Sync the directory entries of `folder` to disk."""
    if os.name == "nt":  # Windows cannot open a folder
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _FSYNC_UNSUPPORTED:
            raise
    finally:
        os.close(descriptor)


def try_lock(descriptor: int, shared: bool = False) -> bool:
    """Lock a file or a folder; False if another process holds the lock, OSError if the file system has no
    locks. Windows has none, and True is returned.
    """
    with suppress(BlockingIOError):
        if fcntl is not None:
            fcntl.flock(descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        return True
    return False


def _require_file(path: Path) -> None:
    """Raise OSError if `path` exists and is not a regular file."""
    kind = kind_of(path)
    if kind not in (None, "a file"):
        number = errno.EISDIR if kind == "a folder" else errno.EINVAL
        raise OSError(number, f"not a file, but {kind}", str(path))


def read_object(path: Path) -> dict[str, Any] | None:
    """Return the JSON object in a file; None if the file cannot be read or holds anything else."""
    try:
        return parse_object(read_bytes(path))
    except OSError:
        return None


def parse_object(content: bytes | str) -> dict[str, Any] | None:
    """Return a JSON object; None if `content` is anything else, or is nested too deep."""
    try:
        value = json.loads(content if isinstance(content, str) else content.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


QUIET_SECONDS = 600.0
"""Write failures less than this many seconds apart are reported once."""


class WriteFailures:
    """Logs a warning when a file can no longer be written, and when it can be written again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failed_at = float("-inf")
        self._is_reported = (
            False  # True from the report of a failure until the report of the recovery
        )

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Report an OSError instead of raising it; the caller keeps its data for the next attempt."""
        try:
            yield
        except OSError as error:
            self.failed(error)
        else:
            self.succeeded()

    def failed(self, error: OSError) -> None:
        now = time.monotonic()
        if not self._is_reported and now - self._failed_at > QUIET_SECONDS:
            self._is_reported = True
            self._report(f"cannot be written ({reason(error)}); training continues and tries again")
        self._failed_at = now

    def succeeded(self) -> None:
        if self._is_reported:
            self._is_reported = False
            self._report("can be written again")

    def _report(self, state: str) -> None:
        log.warning("disk: '%s' %s", self.path, state)
