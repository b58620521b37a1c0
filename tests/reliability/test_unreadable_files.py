"""A text or file that cannot be read is named, and never called missing."""

from __future__ import annotations

import importlib
import os
import resource
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.yaml_files import to_yaml
from moe_ffn.data import prepare as prepare_module
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    DOCUMENTS_FILE,
    FACTS_FILE,
    METRICS_FILE,
    TOKENIZER_FILE,
)
from tests.helpers.tiny_runs import options, run_here, trained, write_corpus

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
    """Run the block as an unprivileged user, unless this process is not root.

    Late imports must happen before: the unprivileged user may be unable to read them.
    """
    is_root = os.geteuid() == 0
    if is_root:
        os.seteuid(NOBODY)
    try:
        yield
    finally:
        if is_root:
            os.seteuid(0)


@pytest.fixture(scope="module", autouse=True)
def _imported() -> None:
    """Import modules that programs import late: an unprivileged user may be unable to read them."""
    for name in ("resource", "moe_ffn.runs.train.run"):
        importlib.import_module(name)
    assert run_here(str(trained()), program="moe_ffn.cli.report").code == 0


@pytest.fixture
def place() -> Iterator[Path]:
    """A folder that every user can enter, unlike pytest's temporary folder."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o777)
        yield Path(name)


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
    return done.mistake


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


def prepared(folder: Path, given: Path) -> Any:
    corpus = {"type": "text", "paths": [str(given)]}
    config = {"corpus": corpus, "seq_len": 8, "cache_dir": str(folder / "cache")}
    return prepare(DataConfig.model_validate(config))


TEXTS: dict[str, tuple[str, bytes, str]] = {
    "cut within a character": ("mine.txt", "text é".encode()[:-1], "not UTF-8 text"),
    "one short line": ("mine.txt", b"short", "data.seq_len"),
    "a NUL at the end": ("mine.txt", b"text " * 99 + b"\0", "mine.txt"),
    "compressed, by its name": ("a.TXT.GZ", b"text" * 99, "a.TXT.GZ"),
    "a name of two lines": ("a\nb.txt", b"\0", "b.txt"),
}


@pytest.mark.parametrize(("name", "content", "said"), TEXTS.values(), ids=TEXTS)
def test_a_bad_text_is_rejected(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    (tmp_path / name).write_bytes(content)

    with pytest.raises(ConfigError) as rejected:
        prepared(tmp_path, tmp_path / name)

    assert said in str(rejected.value)
    assert not list((tmp_path / "cache").rglob("*.unfinished"))


@pytest.mark.parametrize(
    "content",
    [b" \n\t" * 500, b"a\rb\r\nc\n\x0b\x0c\xe2\x80\xa8" * 99],
    ids=["only spaces", "line ends of every kind"],
)
def test_an_odd_text_is_read(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "a.txt").write_bytes(content)

    assert prepared(tmp_path, tmp_path / "a.txt").train_size.num_tokens > 0


@pytest.mark.parametrize("change", [Path.unlink, lambda path: os.truncate(path, 100)])
def test_a_text_that_changes_while_it_is_read_is_rejected(
    tmp_path: Path, change: Callable[[Path], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The corpus changes between the first and the second pass over the text."""
    corpus = write_corpus(tmp_path / "corpus")
    build = prepare_module._build

    def build_from_changed(*args: Any) -> None:
        change(corpus / "7.txt")
        build(*args)

    monkeypatch.setattr(prepare_module, "_build", build_from_changed)
    with pytest.raises(ConfigError, match=r"\.txt' "):
        prepared(tmp_path, corpus)
    assert not list((tmp_path / "cache").glob("[!.]*")), "a cache was left"


# -- disks without room for the prepared data

ROOMS = (0, 1, 20, 160, 600, 2500)
"""Bytes that one file may have; `tokenizer.json` has 20, `train.bin` 5,142."""


@contextmanager
def room_for(num_bytes: int) -> Iterator[None]:
    """Limit the length of a file, as a full disk does to the file that meets its end."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_a_disk_without_room_is_named_and_used_once_there_is_room(tmp_path: Path) -> None:
    corpus, cache = write_corpus(tmp_path / "corpus"), tmp_path / "cache"
    for num_bytes in ROOMS:
        with room_for(num_bytes), pytest.raises(ConfigError) as rejected:
            prepared(tmp_path, corpus)

        assert str(rejected.value) == (
            f"data.cache_dir: '{cache}' cannot be written (File too large); make room, or name another "
            "folder"
        ), num_bytes
        assert not list(cache.iterdir()), f"{num_bytes}: something half-written was left"

    assert prepared(tmp_path, corpus).train_size.num_documents > 0
