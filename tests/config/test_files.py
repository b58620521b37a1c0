"""Files that are atomic, JSON that may be damaged, and the messages about a disk that fails."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from unittest.mock import Mock

import pytest

from moe_ffn.config import files
from moe_ffn.config.files import (
    QUIET_SECONDS,
    WriteFailures,
    kind_of,
    open_file,
    parse_object,
    read_bytes,
    read_object,
    remove_unfinished,
    replacing,
    sync_folder,
    write_atomically,
)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_content_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "file"
    write_atomically(path, "before")

    write_atomically(path, "wörter")

    assert path.read_bytes() == "wörter".encode()
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600), (0o002, 0o664)])
def test_the_umask_decides_the_permissions(tmp_path: Path, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        write_atomically(tmp_path / "file", "content")
    finally:
        os.umask(before)

    assert (tmp_path / "file").stat().st_mode & 0o777 == mode


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt()], ids=str)
def test_an_error_while_writing_keeps_the_file(tmp_path: Path, error: BaseException) -> None:
    path = tmp_path / "file"
    write_atomically(path, "before")

    def write_half() -> None:
        with replacing(path) as file:
            file.write(b"half")
            raise error

    with pytest.raises(type(error)):
        write_half()

    assert path.read_text() == "before"
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize(("owner", "call"), [(os, "fsync"), (Path, "replace")], ids=str)
def test_an_error_at_the_end_keeps_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: object, call: str
) -> None:
    path = tmp_path / "file"
    write_atomically(path, "before")

    monkeypatch.setattr(owner, call, Mock(side_effect=OSError(errno.EIO, "Input/output error")))
    with pytest.raises(OSError, match="Input/output error"):
        write_atomically(path, "after")

    assert path.read_text() == "before"
    assert names(tmp_path) == ["file"]


def test_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").mkdir()

    with pytest.raises(OSError, match="not a file, but a folder"):
        write_atomically(tmp_path / "file", "content")

    assert names(tmp_path) == ["file"]


def test_only_unfinished_files_are_removed(tmp_path: Path) -> None:
    for name in (".file.abc.unfinished", "file", "mine.unfinished", ".hidden"):
        (tmp_path / name).touch()

    remove_unfinished(tmp_path)

    assert names(tmp_path) == [".hidden", "file", "mine.unfinished"]


@pytest.mark.parametrize(
    ("code", "fails"), [(errno.EINVAL, False), (errno.ENOTSUP, False), (errno.EIO, True)]
)
def test_a_file_system_may_lack_sync_of_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int, fails: bool
) -> None:
    monkeypatch.setattr(os, "fsync", Mock(side_effect=OSError(code, os.strerror(code))))
    if fails:
        with pytest.raises(OSError, match="Input/output error"):
            sync_folder(tmp_path)
    else:
        sync_folder(tmp_path)


@pytest.mark.parametrize("kind", ["a pipe", "a socket"])
def test_pipes_and_sockets_are_neither_opened_nor_replaced(tmp_path: Path, kind: str) -> None:
    """Root could otherwise replace a device such as /dev/null."""
    path = tmp_path / "file"
    os.mknod(path, 0o600 | (stat.S_IFIFO if kind == "a pipe" else stat.S_IFSOCK))

    for do in (lambda: write_atomically(path, "content"), lambda: read_bytes(path)):
        with pytest.raises(OSError, match=f"not a file, but {kind}"):
            do()

    assert kind_of(path) == kind
    assert names(tmp_path) == ["file"]


def test_a_link_is_read_but_not_written_through_and_may_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "mine").write_text("mine")
    path = tmp_path / "file"
    path.symlink_to("mine")

    assert read_bytes(path) == b"mine"
    with pytest.raises(OSError, match="symbolic links"):
        open_file(path, "ab")
    write_atomically(path, "content")

    assert (path.read_text(), kind_of(path)) == ("content", "a file")
    assert (tmp_path / "mine").read_text() == "mine"


DEEP = "[" * 100_000


def test_an_object_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, 2.5, null]}')

    assert read_object(tmp_path / "a.json") == {"a": [1, 2.5, None]}
    assert parse_object("{}") == {}


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "3", '{"a": 1', f'{{"a": {"9" * 5_000}}}', DEEP]
)
def test_anything_else_is_none(text: str) -> None:
    assert parse_object(text) is None


def test_a_file_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b'{"a": "\xff"}')

    assert read_object(tmp_path / "bytes.json") is None
    assert read_object(tmp_path / "missing.json") is None
    assert read_object(tmp_path) is None


FULL = OSError(28, "No space left on device")
FAILS = (
    "disk: 'run' cannot be written (No space left on device); training continues and tries again"
)
WORKS = "disk: 'run' can be written again"


def test_a_problem_that_comes_and_goes_is_reported_once_and_a_later_one_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = [0.0]
    monkeypatch.setattr(files.time, "monotonic", lambda: times[-1])
    disk = WriteFailures(Path("run"))

    for _ in range(3):
        disk.failed(FULL)
        disk.failed(FULL)
        disk.succeeded()
        disk.succeeded()

    assert capsys.readouterr().err.splitlines() == [FAILS, WORKS]
    times.append(QUIET_SECONDS + 1)
    disk.failed(FULL)
    assert capsys.readouterr().err.splitlines() == [FAILS]
