"""One process holds a run."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import shutil
from pathlib import Path

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.runs import folder as folder_of_runs
from moe_ffn.runs.folder import LOCK_FILE, is_trained_here, locked


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_of_runs, "_LOCK_TIMEOUT_SECONDS", 0.1)


@pytest.mark.usefixtures("_impatient")
def test_a_run_is_held_by_one_process(tmp_path: Path) -> None:
    assert is_trained_here(tmp_path) is None, "nobody ever held it"
    with locked(tmp_path):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.apply(is_trained_here, [tmp_path])
        with pytest.raises(ConfigError, match=r"is being trained by another process; stop that"):
            locked(tmp_path).__enter__()
    assert is_trained_here(tmp_path) is False


def test_of_another_machine_nothing_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(tmp_path):
        pass
    monkeypatch.setattr("platform.node", lambda: "another")
    assert is_trained_here(tmp_path) is None


@pytest.mark.usefixtures("_impatient")
def test_a_run_stays_held_when_its_lock_file_is_removed(tmp_path: Path) -> None:
    with locked(tmp_path):
        (tmp_path / LOCK_FILE).unlink()
        with pytest.raises(ConfigError, match=r"is being trained by another process"):
            locked(tmp_path).__enter__()
        assert is_trained_here(tmp_path)


@pytest.mark.usefixtures("_impatient")
def test_a_file_system_that_locks_no_folders_has_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NFS takes an exclusive lock only where one may write."""
    flock = fcntl.flock

    def of_files(descriptor: int, operation: int) -> None:
        if os.path.isdir(descriptor):  # noqa: PTH112 - of a descriptor
            raise OSError(errno.EBADF, "Bad file descriptor")
        flock(descriptor, operation)

    monkeypatch.setattr(fcntl, "flock", of_files)
    with locked(tmp_path):
        with pytest.raises(ConfigError, match=r"is being trained by another process"):
            locked(tmp_path).__enter__()
        assert is_trained_here(tmp_path)
    assert is_trained_here(tmp_path) is False


def test_the_name_of_the_machine_replaces_that_of_another(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("a machine with a much longer name " * 9)
    with locked(tmp_path), multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(is_trained_here, [tmp_path])


def test_a_reader_that_only_asks_keeps_nobody_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the lock for a moment."""
    flock, refused = fcntl.flock, 3

    def busy(file: int, operation: int) -> None:
        nonlocal refused
        refused -= 1
        if refused >= 0:
            raise BlockingIOError
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", busy)

    with locked(tmp_path):
        assert refused < 0


def test_a_run_whose_folder_cannot_be_written_is_not_held(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    shutil.rmtree(folder)
    with locked(folder):
        assert is_trained_here(folder) is None
