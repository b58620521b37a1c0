"""Links are followed when reading and never written through; nobody waits at a pipe or a device."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
import yaml

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.yaml_files import read_yaml, to_yaml
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.files import write_file
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    DOCUMENTS_FILE,
    FACTS_FILE,
    METRICS_FILE,
    TOKENIZER_FILE,
    check_is_run,
)
from tests.helpers.snapshot import snapshot
from tests.helpers.tiny_runs import finished_copy, run_here, write_corpus

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


IN_THE_PLACE_OF_A_FOLDER = {
    "a pipe": _pipe,
    "a file": _file,
}
PROGRAMS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "train": lambda run: ("--resume", str(run)),
    "generate": lambda run: (str(run),),
    "trace": lambda run: (str(run), "--text", "the cat"),
    "report": lambda run: (str(run),),
    "compare": lambda run: (str(run),),
}  # fmt: skip


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
    (tmp_path / "run.yaml").write_text("{}")
    folder = tmp_path / "runs" / "run"
    (folder / CHECKPOINTS_FOLDER).mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(to_yaml(TrainConfig()))
    for name in (FACTS_FILE, TOKENIZER_FILE, DOCUMENTS_FILE):
        (folder / name).write_text("{}")
    (folder / METRICS_FILE).write_text('{"step": 2, "loss": 1.0}\n')
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


def _state(folder: Path) -> object:
    """All that can be known of a folder and of what is in it, but when it was read."""
    stats = [path.lstat() for path in (folder, *sorted(folder.rglob("*")))]
    return snapshot(folder), [(found.st_mode, found.st_mtime_ns, found.st_ino) for found in stats]


def _plant(path: Path, plant: Callable[[Path, Path], None], mine: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    plant(path, mine)


# -- files and folders of a run


def test_a_run_that_is_named_by_a_link_is_that_run(folder: Path) -> None:
    """Its user named it; the run's own files are behind it."""
    latest = folder.with_name("latest")
    latest.symlink_to(folder.name)

    check_is_run(latest)
    write_file(latest, "code/own.py", "code")

    assert (folder / "code" / "own.py").read_text() == "code"


def test_links_to_runs_and_their_folders_are_followed(tmp_path: Path) -> None:
    """As where `checkpoints/` was moved to another disk, and a run is linked into a folder of results."""
    run = finished_copy(tmp_path)
    elsewhere = (run / CHECKPOINTS_FOLDER).rename(tmp_path / "other-disk")
    (run / CHECKPOINTS_FOLDER).symlink_to(elsewhere)
    (run / METRICS_FILE).rename(tmp_path / "metrics")
    (run / METRICS_FILE).symlink_to(tmp_path / "metrics")
    rows = (tmp_path / "metrics").read_text()
    link = tmp_path / "latest"
    link.symlink_to(run)

    for program in ("generate", "trace", "report", "compare"):
        done = run_here(*PROGRAMS[program](link), program=f"moe_ffn.cli.{program}")
        assert done.code == 0, (program, done.stderr)
    done = run_here("--resume", str(link), "--trainer.max_steps", "14")
    assert done.code == 0, done.stderr

    assert (elsewhere / "step_00000014.ckpt").is_file()
    assert (run / CHECKPOINTS_FOLDER).is_symlink()
    assert not (run / METRICS_FILE).is_symlink(), "rows are added to a copy"
    assert (tmp_path / "metrics").read_text() == rows


def test_checkpoints_on_a_disk_that_is_not_mounted_are_named(tmp_path: Path) -> None:
    run = finished_copy(tmp_path)
    (run / CHECKPOINTS_FOLDER).rename(tmp_path / "other-disk")
    (run / CHECKPOINTS_FOLDER).symlink_to(tmp_path / "unmounted")

    done = run_here(str(run), program="moe_ffn.cli.generate")

    assert (done.code, done.own_lines) == (
        2,
        [
            f"error: '{run / CHECKPOINTS_FOLDER}' is a link to '{tmp_path / 'unmounted'}', which is not "
            "there; mount its disk, or put it back"
        ],
    )


# -- the cache


@pytest.fixture
def data(tmp_path: Path) -> DataConfig:
    corpus = {"type": "text", "paths": [str(write_corpus(tmp_path / "corpus"))]}
    return DataConfig.model_validate(
        {"corpus": corpus, "cache_dir": str(tmp_path / "cache"), "seq_len": 16}
    )


# -- what a person names


def test_a_config_in_a_pipe_is_read(folder: Path) -> None:
    """As `--config <(command)` gives it."""
    end, start = os.pipe()
    os.write(start, b"seed: 7\n")
    os.close(start)
    try:
        assert read_yaml(Path(f"/dev/fd/{end}"), "--config") == {"seed": 7}
    finally:
        os.close(end)


def test_a_config_in_a_pipe_is_waited_for_while_somebody_writes(tmp_path: Path) -> None:
    path = tmp_path / "pipe.yaml"
    os.mkfifo(path)

    def write() -> None:
        with path.open("wb", buffering=0) as file:
            for part in (b"seed:", b" 7\n"):
                time.sleep(0.1)
                file.write(part)

    writer = Thread(target=write)
    writer.start()
    with within(10):
        assert read_yaml(path, "--config") == {"seed": 7}
    writer.join()


@pytest.mark.parametrize(
    "corpus",
    [
        "{type: text, paths: ['%s']}",
        pytest.param("{type: hf_dataset, path: '%s'}", marks=pytest.mark.slow),
    ],
)
def test_a_corpus_that_is_a_pipe_is_refused(tmp_path: Path, corpus: str) -> None:
    if "hf_dataset" in corpus:
        pytest.importorskip("datasets")
    path = tmp_path / "pipe.txt"
    os.mkfifo(path)

    with within(10), pytest.raises(ConfigError, match=r"data\.corpus\.path.*pipe\.txt"):
        prepare(DataConfig.model_validate({"corpus": yaml.safe_load(corpus % path)}))


def test_a_pipe_among_the_files_of_a_corpus_is_left_out(data: DataConfig, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "corpus" / "pipe.txt")

    with within(10):
        assert prepare(data).documents.count == 12
