"""What may not be read is said to be so by its name, and never to be missing."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from moe_ffn.config.yaml_files import to_yaml
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import (
    CHECKPOINTS_FOLDER,
    CODE_FOLDER,
    CONFIG_FILE,
    DOCUMENTS_FILE,
    FACTS_FILE,
    METRICS_FILE,
    TOKENIZER_FILE,
)
from tests.helpers.nobody import nobody, open_place
from tests.helpers.tiny_runs import options, run_here

PROGRAMS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "train": lambda run: ("--resume", str(run)),
    "generate": lambda run: (str(run), "--prompt", "the"),
    "trace": lambda run: (str(run), "--text", "the cat"),
    "report": lambda run: (str(run),),
    "report --watch": lambda run: (str(run), "--watch"),
}
NEEDED = {
    "train": (CONFIG_FILE,),
    "generate": (CONFIG_FILE, TOKENIZER_FILE),
    "trace": (CONFIG_FILE, TOKENIZER_FILE),
    "report": (METRICS_FILE,),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _imported(tmp_path_factory: pytest.TempPathFactory) -> None:
    """All that a program imports late, which nobody may not be allowed to read."""
    for name in ("resource", "moe_ffn.cli.training_run"):
        importlib.import_module(name)
    run = _write_run(tmp_path_factory.mktemp("imported") / "run")
    done = run_here(str(run), program="moe_ffn.cli.report")
    assert done.code == 0, done.stderr
    prepare(
        DataConfig.model_validate(
            {"corpus": {"type": "text", "paths": [__file__]}, "seq_len": 16, "cache_dir": str(run)}
        ),
    )


@pytest.fixture
def place() -> Iterator[Path]:
    with open_place() as found:
        yield found


@pytest.fixture
def folder(place: Path) -> Path:
    return _write_run(place / "runs" / "run")


def _write_run(folder: Path) -> Path:
    """A folder that looks like a run's, of a run that is not finished."""
    for name in (CHECKPOINTS_FOLDER, CODE_FOLDER):
        (folder / name).mkdir(parents=True)
    (folder / CONFIG_FILE).write_text(to_yaml(TrainConfig()))
    for name in (FACTS_FILE, TOKENIZER_FILE, DOCUMENTS_FILE):
        (folder / name).write_text("{}")
    (folder / METRICS_FILE).write_text('{"step": 2, "loss": 1.0}\n')
    return folder


def _refused(program: str, *argv: str) -> str:
    with nobody():
        done = run_here(*argv, program=f"moe_ffn.cli.{program.split()[0]}")
    assert done.code == 2, done.stderr
    (line,) = done.own_lines
    return line.removeprefix("error: ")


@pytest.mark.parametrize(
    ("program", "name"), [(program, name) for program in NEEDED for name in NEEDED[program]]
)
def test_a_part_of_a_run(folder: Path, program: str, name: str) -> None:
    (folder / name).chmod(0)
    try:
        said = _refused(program, *PROGRAMS[program](folder))
    finally:
        (folder / name).chmod(0o755)

    assert said.startswith(f"'{folder / name}'")
    assert "Permission denied" in said


@pytest.mark.parametrize("mode", [0, 0o444], ids=["nothing", "not to be entered"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_run(folder: Path, program: str, mode: int) -> None:
    folder.chmod(mode)
    try:
        said = _refused(program, *PROGRAMS[program](folder))
    finally:
        folder.chmod(0o755)

    assert said == f"'{folder}' cannot be read (Permission denied); fix its permissions"


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_folder_of_runs(folder: Path, program: str) -> None:
    folder.parent.chmod(0)
    try:
        said = _refused(program, *PROGRAMS[program](folder))
    finally:
        folder.parent.chmod(0o755)

    assert said == f"'{folder}' cannot be read (Permission denied); fix its permissions"


def test_the_newest_run_is_looked_for_among_those_that_can_be_read(folder: Path) -> None:
    folder.chmod(0)
    try:
        said = _refused("train", "--resume", "--run.output_dir", str(folder.parent))
    finally:
        folder.chmod(0o755)

    assert said.startswith(f"--resume: '{folder.parent}' has no run"), said


def test_the_newest_run_in_a_folder_that_cannot_be_read(folder: Path) -> None:
    folder.parent.chmod(0)
    try:
        said = _refused("train", "--resume", "--run.output_dir", str(folder.parent))
    finally:
        folder.parent.chmod(0o755)

    assert said == f"run.output_dir: '{folder.parent}' cannot be read (Permission denied)"


OF_A_NEW_RUN = {
    "runs": "run.output_dir: '{path}' cannot be written (Permission denied); choose another with "
    "--run.output_dir",
    "cache": "data.cache_dir: '{path}' cannot be written (Permission denied); make room, or name another "
    "folder",
    "corpus": "data.corpus: '{path}' cannot be read (Permission denied)",
    "corpus/7.txt": "data.corpus: '{path}' cannot be read (Permission denied)",
}


@pytest.mark.parametrize("name", OF_A_NEW_RUN)
def test_a_place_of_a_new_run(place: Path, name: str) -> None:
    argv = options(place, run__name="run")
    for made in ("runs", "cache"):
        (place / made).mkdir()
        (place / made).chmod(0o777)
    path = place / name
    path.chmod(0)
    try:
        said = _refused("train", *argv)
    finally:
        path.chmod(0o755)

    assert said == OF_A_NEW_RUN[name].format(path=path)


def test_a_config(place: Path) -> None:
    path = place / "mine.yaml"
    path.touch(0)

    assert _refused("train", "--config", str(path)) == f"--config {path}: Permission denied"


def test_a_page_needs_no_more_than_it_shows(folder: Path, place: Path) -> None:
    """Of a run of somebody else's, who keeps the weights and the config."""
    for name in (CHECKPOINTS_FOLDER, CONFIG_FILE, FACTS_FILE, TOKENIZER_FILE):
        (folder / name).chmod(0)
    try:
        with nobody():
            done = run_here(
                str(folder), "--output", str(place / "page.html"), program="moe_ffn.cli.report"
            )
    finally:
        (folder / CHECKPOINTS_FOLDER).chmod(0o755)

    assert done.code == 0, done.stderr
