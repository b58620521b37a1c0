"""Nothing outside a run's folder is read, written or removed through what stands in it, and nothing in it is
waited for.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

from experiments.command_line import to_yaml
from experiments.config import TrainConfig
from experiments.run_folder import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    DOCUMENTS_FILE,
    FACTS_FILE,
    FILES,
    FOLDERS,
    METRICS_FILE,
    TOKENIZER_FILE,
)
from experiments.run_lock import LOCK_FILE
from experiments.selftest.scene import run_here

# -- what is planted


def _link(path: Path, mine: Path) -> None:
    path.symlink_to(mine)


def _link_to_nothing(path: Path, mine: Path) -> None:
    path.symlink_to(mine.parent / "nothing")


def _link_to_a_folder(path: Path, mine: Path) -> None:
    path.symlink_to(mine.parent)


def _pipe(path: Path, mine: Path) -> None:
    os.mkfifo(path)


def _socket(path: Path, mine: Path) -> None:
    there = os.getcwd()  # noqa: PTH109 - the name of a socket is at most a hundred bytes long
    os.chdir(path.parent)
    try:
        with socket.socket(socket.AF_UNIX) as own:
            own.bind(path.name)
    finally:
        os.chdir(there)


def _folder(path: Path, mine: Path) -> None:
    path.mkdir()


def _file(path: Path, mine: Path) -> None:
    path.write_text("mine")


IN_THE_PLACE_OF_A_FILE = {
    "a symbolic link": _link,
    "a pipe": _pipe,
    "a socket": _socket,
    "a folder": _folder,
}
IN_THE_PLACE_OF_A_FOLDER = {
    "a symbolic link": _link_to_a_folder,
    "a pipe": _pipe,
    "a file": _file,
}
PROGRAMS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "train": lambda run: ("--resume", str(run)),
    "generate": lambda run: (str(run),),
    "trace": lambda run: (str(run), "--text", "the cat"),
    "report": lambda run: (str(run),),
}


# -- the scene


class Waited(BaseException):
    """The program took longer than it may."""


@contextmanager
def within(seconds: int) -> Iterator[None]:
    def end(signum: int, frame: object) -> None:
        raise Waited

    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that looks like a run's, of a run that is not finished."""
    folder = tmp_path / "runs" / "run"
    (folder / CHECKPOINTS_FOLDER).mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(to_yaml(TrainConfig()))
    for name in (FACTS_FILE, TOKENIZER_FILE, DOCUMENTS_FILE):
        (folder / name).write_text("{}")
    (folder / METRICS_FILE).write_text("step,loss\n2,1.0\n")
    (folder / CHECKPOINTS_FOLDER / "best.ckpt").write_text("")
    return folder


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A file of somebody's own, in a folder of their own."""
    outside = tmp_path / "outside"
    (outside / "inner").mkdir(parents=True)
    for name in ("mine", "step_00000004.ckpt", ".mine.unfinished", "inner/mine"):
        (outside / name).write_text(f"step,loss\n2,1.0\n{name}\n")
        os.utime(outside / name, (10, 10))
    return outside / "mine"


def _state(folder: Path) -> dict[str, tuple[object, ...]]:
    """All that can be known of what is in a folder, but when it was read."""
    state: dict[str, tuple[object, ...]] = {}
    for path in (folder, *sorted(folder.rglob("*"))):
        found = path.lstat()
        content = path.read_bytes() if path.is_file() and not path.is_symlink() else b""
        link = path.readlink() if path.is_symlink() else None
        state[str(path)] = (found.st_mode, found.st_mtime_ns, found.st_ino, content, link)
    return state


def _plant(path: Path, plant: Callable[[Path, Path], None], mine: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    plant(path, mine)


def _refused(program: str, run: Path) -> str:
    with within(20):
        done = run_here(*PROGRAMS[program](run), program=f"experiments.{program}")
    assert done.code == 2, done.stderr
    (line,) = done.own_lines
    return line.removeprefix("error: ")


# -- files and folders of a run

CASES = [
    *[(name, what) for name, what in product(FILES, IN_THE_PLACE_OF_A_FILE)],
    *[(name, what) for name, what in product(FOLDERS, IN_THE_PLACE_OF_A_FOLDER)],
]
OFTEN = {("report.html", "a folder"), (LOCK_FILE, "a symbolic link"), (CONFIG_FILE, "a pipe")}


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize(("name", "what"), CASES)
def test_what_stands_in_the_place_of_a_file_is_refused_by_its_name(
    folder: Path, mine: Path, program: str, name: str, what: str
) -> None:
    plants = IN_THE_PLACE_OF_A_FILE if name in FILES else IN_THE_PLACE_OF_A_FOLDER
    _plant(folder / name, plants[what], mine)
    before = _state(mine.parent), _state(folder)

    said = _refused(program, folder)

    kind = "a file" if name in FILES else "a folder"
    assert said == (
        f"'{folder / name}' is {what}, and has to be {kind} of the run's own; put back what it was, or "
        "remove it"
    )
    assert (_state(mine.parent), _state(folder)) == before
