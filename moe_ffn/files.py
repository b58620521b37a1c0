"""Reading and writing files: writes are atomic, reading follows links, pipes and devices are refused."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import secrets
import select
import shutil
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO, Literal

UNFINISHED = ".unfinished"
"""Suffix of a file that is being written, or was when its process died."""

DAMAGED = ".damaged"
"""Suffix of the copy that is kept of a damaged file before it is repaired."""

_KINDS = {
    stat.S_IFREG: "a file",
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
}

_ABSENT = {errno.ENOENT, errno.ENOTDIR, errno.ELOOP}
"""Errors of `stat` where there is nothing, or a link that leads nowhere."""

# Windows lacks both.
_O_NOFOLLOW, _O_NONBLOCK = getattr(os, "O_NOFOLLOW", 0), getattr(os, "O_NONBLOCK", 0)

WRITER_SECONDS = 5.0
"""Seconds to wait for the first writer of a pipe."""

_FSYNC_UNSUPPORTED = {errno.EINVAL, errno.ENOTSUP}
"""Errors of file systems that cannot sync a folder."""


def reason(error: OSError) -> str:
    """Return the system's words without number and path, as in `No space left on device`."""
    return error.strerror or str(error) or type(error).__name__


def kind_of(path: Path) -> str | None:
    """Return the kind of thing at `path`, or at the end of a link there; None where there is nothing.

    `a file`, `a folder`, `a pipe`, `a socket` or `a device`.

    Raises:
        OSError: it cannot be determined.
    """
    try:
        return _KINDS.get(stat.S_IFMT(path.stat().st_mode), "a device")
    except OSError as error:
        if error.errno not in _ABSENT:
            raise
        return None


def open_file(path: Path, mode: Literal["rb", "ab", "r+b"] = "rb") -> BinaryIO:
    """Open a regular file, without waiting for the other end of a pipe.

    Reading follows links. Writing does not, so that a folder of linked files never changes their targets.

    Raises:
        OSError: something else stands there, or it cannot be opened.
    """
    no_follow = 0 if mode == "rb" else _O_NOFOLLOW

    def opener(name: str, flags: int) -> int:
        _require_file(path)  # before it is opened, which some devices answer by doing something
        descriptor = os.open(name, flags | no_follow | _O_NONBLOCK, 0o666)
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):  # put there in between
            os.close(descriptor)
            raise OSError(errno.EINVAL, "no file", name)
        return descriptor

    return open(path, mode, opener=opener)


def read_bytes(path: Path) -> bytes:
    """The content of a regular file; see `open_file`."""
    with open_file(path) as file:
        return file.read()


def sha256_of(path: Path) -> str:
    """Of the content of a regular file, in hexadecimal; see `open_file`."""
    with open_file(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()  # pyright: ignore


def read_text(path: Path, errors: str = "strict") -> str:
    """The content of a regular file, decoded from UTF-8; line ends are kept."""
    return read_bytes(path).decode("utf-8", errors)


def read_given(path: Path, max_bytes: int) -> bytes:
    """The first bytes of a file, the target of a link, or a pipe such as `<(command)`.

    A pipe is read as long as it has a writer, and the first one is waited for a few seconds.

    Raises:
        OSError: it cannot be read, or no writer came.
    """
    descriptor = os.open(path, os.O_RDONLY | _O_NONBLOCK)
    parts: list[bytes] = []
    has_waited = False
    with os.fdopen(descriptor, "rb", buffering=0) as file:
        while (left := max_bytes - sum(map(len, parts))) > 0:
            part = file.read(left)
            if part is None:  # a writer who is not done yet
                select.select([file], [], [])
            elif part:
                parts.append(part)
            elif parts or has_waited or stat.S_ISREG(os.fstat(descriptor).st_mode):
                break
            elif not select.select([file], [], [], WRITER_SECONDS)[0]:
                raise OSError(errno.EPIPE, f"a pipe that nobody writes to in {WRITER_SECONDS:g} s")
            else:
                has_waited = True
    return b"".join(parts)


def write_file(folder: Path, name: str, text: str) -> None:
    """Put a file into a folder, whole; its `name` may begin with that of a folder in it."""
    path = folder / name
    if path.parent != folder:
        make_folder(path.parent)
    write_whole(path, text)


def make_folder(path: Path) -> None:
    """Make a folder, and its parents, where there is none.

    Raises:
        OSError: it cannot be made, or something else stands there.
    """
    if (kind := kind_of(path)) not in (None, "a folder"):
        raise OSError(errno.ENOTDIR, f"no folder, but {kind}", str(path))
    if kind is None and path.is_symlink():
        raise OSError(errno.ENOENT, "a link to nothing", str(path))
    path.mkdir(parents=True, exist_ok=True)


@contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """A file to write and to read, beside `path`; it takes the place of `path` when the block ends.

    Until then, and after an error or the death of the process, `path` is what it was before. When this
    returns the content is on the disk. A link there is replaced itself; a pipe or a device is an OSError.
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
    """A new folder beside `path`, which takes its place when the block ends.

    After an error `path` is what it was before; a process that is killed between the two renames leaves that
    as `.NAME.*.old.unfinished`.
    """
    make_folder(path.parent)
    mark = secrets.token_hex(4)
    new, old = (path.with_name(f".{path.name}.{mark}{kind}{UNFINISHED}") for kind in ("", ".old"))
    new.mkdir()
    try:
        yield new
        for place in new.rglob("*"):
            if place.is_file():
                with place.open("rb") as file:
                    os.fsync(file.fileno())
            else:
                sync_folder(place)
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
    """Names in their order, cut into files of at most `max_bytes`; what is larger has one of its own."""
    files: list[list[str]] = [[]]
    filled = 0
    for name, size in sizes.items():
        if files[-1] and filled + size > max_bytes:
            files.append([])
            filled = 0
        files[-1].append(name)
        filled += size
    return files


def write_whole(path: Path, content: str | bytes) -> None:
    """Write `content` to `path` as `replacing` does; text as UTF-8."""
    with replacing(path) as file:
        file.write(content.encode() if isinstance(content, str) else content)


def set_aside(path: Path) -> Path:
    """Copy a damaged file before it is repaired; returns the path of the copy, beside it."""
    kept = path.with_name(f"{path.name}{DAMAGED}")
    write_whole(kept, read_bytes(path))
    return kept


def remove_unfinished(folder: Path) -> None:
    """Remove what processes that died had half written, and put back what they were about to replace."""
    for path in folder.glob(f".*{UNFINISHED}"):
        with suppress(OSError):
            if kind_of(path) != "a folder":
                path.unlink()
                continue
            name, _, kind = path.name.removesuffix(UNFINISHED)[1:].rpartition(".")
            place = folder / name.rpartition(".")[0]
            if kind == "old" and not place.exists():
                path.rename(place)
            else:
                shutil.rmtree(path)


def sync_folder(folder: Path) -> None:
    """Return when the names in `folder` are on the disk."""
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


def _require_file(path: Path) -> None:
    """Raise OSError where there is something that is no file."""
    kind = kind_of(path)
    if kind not in (None, "a file"):
        number = errno.EISDIR if kind == "a folder" else errno.EINVAL
        raise OSError(number, f"no file, but {kind}", str(path))


def read_object(path: Path) -> dict[str, Any] | None:
    """The JSON object in a file; None where the file cannot be read or holds anything else."""
    try:
        return parse_object(read_bytes(path))
    except OSError:
        return None


def parse_object(content: bytes | str) -> dict[str, Any] | None:
    """A JSON object; None where `content` is anything else, or is nested a thousand levels deep."""
    try:
        value = json.loads(content if isinstance(content, str) else content.decode())
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


QUIET_SECONDS = 600.0
"""Failures of a disk less than this many seconds apart are reported once."""


class WriteFailures:
    """Reports on stderr when a file can no longer be written, and when it can again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._failed_at = float("-inf")
        self._is_said = False  # to fail, and not yet to be written again

    @contextmanager
    def expected(self) -> Iterator[None]:
        """Report an OSError and go on; the caller keeps what could not be written for the next time."""
        try:
            yield
        except OSError as error:
            self.failed(error)
        else:
            self.succeeded()

    def failed(self, error: OSError) -> None:
        now = time.monotonic()
        if not self._is_said and now - self._failed_at > QUIET_SECONDS:
            self._is_said = True
            self._say(f"cannot be written ({reason(error)}); training goes on and tries again")
        self._failed_at = now

    def succeeded(self) -> None:
        if self._is_said:
            self._is_said = False
            self._say("is written again")

    def _say(self, what: str) -> None:
        print(f"disk: '{self.path}' {what}", file=sys.stderr, flush=True)
