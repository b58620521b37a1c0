"""A file or folder without read permission is named, and never called missing."""

from __future__ import annotations

import importlib
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moe_ffn.config.yaml_files import to_yaml
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    DOCUMENTS_FILE,
    FACTS_FILE,
    METRICS_FILE,
    TOKENIZER_FILE,
)
from tests.helpers.tiny_runs import options, run_here, trained

PROGRAMS: dict[str, tuple[Callable[[Path], tuple[str, ...]], tuple[str, ...]]] = {
    "train": (lambda run: ("--resume", str(run)), (CONFIG_FILE,)),
    "generate": (lambda run: (str(run), "--prompt", "the"), (CONFIG_FILE, TOKENIZER_FILE)),
    "trace": (lambda run: (str(run), "--text", "the cat"), (CONFIG_FILE, TOKENIZER_FILE)),
    "report": (lambda run: (str(run),), (METRICS_FILE,)),
}
"""Arguments of each program, and the files that it needs."""


NOBODY = 65534


@contextmanager
def nobody() -> Iterator[None]:
    """Within this the process is that of a user without any rights, unless it is one already.

    What is imported late has to be imported before: nobody may not be allowed to read it.
    """
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@contextmanager
def open_place() -> Iterator[Path]:
    """A folder that all may enter, which pytest's own is not."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import what programs import late: a user without rights may not be allowed to read it."""
    for name in ("resource", "moe_ffn.cli.training_run"):
        importlib.import_module(name)
    assert run_here(str(trained()), program="moe_ffn.cli.report").code == 0


@pytest.fixture
def place() -> Iterator[Path]:
    with open_place() as found:
        yield found


@pytest.fixture
def folder(place: Path) -> Path:
    folder = place / "runs" / "run"
    (folder / CHECKPOINTS_FOLDER).mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(to_yaml(TrainConfig()))
    for name in (FACTS_FILE, TOKENIZER_FILE, DOCUMENTS_FILE):
        (folder / name).write_text("{}")
    (folder / METRICS_FILE).write_text('{"step": 2, "loss": 1.0}\n')
    return folder


def rejected(unreadable: Path, program: str, *argv: str) -> str:
    """The error of a program that a user without rights starts while a path is not readable."""
    unreadable.chmod(0)
    try:
        with nobody():
            done = run_here(*argv, program=f"moe_ffn.cli.{program}")
    finally:
        unreadable.chmod(0o755)
    assert done.code == 2, done.stderr
    (line,) = done.own_lines
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("program", "name"),
    [(program, name) for program, (_, names) in PROGRAMS.items() for name in names],
)
def test_a_file_of_a_run(folder: Path, program: str, name: str) -> None:
    said = rejected(folder / name, program, *PROGRAMS[program][0](folder))

    assert said.startswith(f"'{folder / name}'")
    assert "Permission denied" in said


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_folder_of_a_run(folder: Path, program: str) -> None:
    said = rejected(folder, program, *PROGRAMS[program][0](folder))

    assert said == f"'{folder}' cannot be read (Permission denied); fix its permissions"


def test_the_newest_run_in_a_folder_that_cannot_be_read(folder: Path) -> None:
    argv = ("--resume", "--run.output_dir", str(folder.parent))

    said = rejected(folder.parent, "train", *argv)

    assert said == f"run.output_dir: '{folder.parent}' cannot be read (Permission denied)"


FOLDERS = {
    "runs": "run.output_dir: '{path}' cannot be written (Permission denied); choose another with "
    "--run.output_dir",
    "cache": "data.cache_dir: '{path}' cannot be written (Permission denied); make room, or name another "
    "folder",
    "corpus": "data.corpus: '{path}' cannot be read (Permission denied)",
    "corpus/7.txt": "data.corpus: '{path}' cannot be read (Permission denied)",
}


@pytest.mark.parametrize("name", FOLDERS)
def test_a_folder_of_a_new_run(place: Path, name: str) -> None:
    argv = options(place, run__name="run")
    for made in ("runs", "cache"):
        (place / made).mkdir()
        (place / made).chmod(0o777)

    said = rejected(place / name, "train", *argv)

    assert said == FOLDERS[name].format(path=place / name)
