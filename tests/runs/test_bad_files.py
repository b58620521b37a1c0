"""Mistakes in a file or folder give exit code 2 and a line that names it."""

from __future__ import annotations

import errno
import fcntl
import multiprocessing
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.cli.command_line import parse_config
from moe_ffn.config.errors import ConfigError
from moe_ffn.runs import folder as folder_of_runs
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import LOCK_FILE, is_training, locked
from moe_ffn.runs.reader import load_model
from moe_ffn.training.recovery.checkpoint_file import read_checkpoint, write_checkpoint
from tests.helpers.tiny_runs import PROGRESS

Reject = Callable[..., str]

# -- config files

FILES = {
    "not YAML": ("model: [1", r"is not valid YAML \(line 1\): .+"),
    "a list": ("- 1\n- 2", r"must hold a YAML mapping, got list$"),
    "a key twice, deep": (
        "model:\n  ffn:\n    type: moe\n    type: glu",
        r"is not valid YAML \(line 4\): 'type' is given twice$",
    ),
    "a value that contains itself": (
        "run: {seed: 1}\nmodel: &a\n  ffn: [*a]",
        r"is not valid YAML \(line 2\): a value contains itself, by an alias .* write it out$",
    ),
    "a merge of itself": (
        "&a {<<: *a}",
        r"is not valid YAML \(line 1\): a value contains itself, .+",
    ),
    "an alias of nobody": ("x: *nobody", r"is not valid YAML \(line 1\): found undefined alias"),
    "a mapping as a key": ("? {a: b}\n: 3", r"is not valid YAML \(line 1\): found unhashable key"),
    "a NUL": ("seed: 1\n\0", r"is not valid YAML"),
    "not UTF-8": (b"run: {name: \xff}", r"is not a UTF-8 text file$"),
    "UTF-16": ("seed: 1".encode("utf-16"), r"is not a UTF-8 text file$"),
    "long": ("# " + "x" * 100_000, r"is longer than 100000 bytes, so it is not a config$"),
}


@pytest.mark.parametrize(("content", "answer"), FILES.values(), ids=FILES)
def test_a_bad_config_file_is_rejected_by_its_name(
    reject: Reject, tmp_path: Path, content: str | bytes, answer: str
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    said = reject("--config", str(path))
    assert re.match(re.escape(f"--config {path}: ") + answer, said), said


def test_many_mistakes_are_cut_to_six_lines(reject: Reject, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("".join(f"k{number}: 1\n" for number in range(9)))
    said = reject("--config", "mine.yaml", lines=6).splitlines()
    assert [line.partition(":")[0] for line in said[:5]] == ["k0", "k1", "k2", "k3", "k4"]
    assert said[5] == "and 4 more mistakes; fix these first"


def test_a_line_break_in_a_key_makes_no_second_line(reject: Reject, tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text('"a\\nb\\e[31m": 1')
    assert reject("--config", "mine.yaml").startswith("a\\nb\\x1b[31m: unknown; known: ")


# -- a custom class


def test_running_custom_code_is_announced_first(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "own.py"
    path.write_text(
        "import sys; print('mine', file=sys.stderr)\n"
        "from moe_ffn.ffn import IdentityConfig\n"
        "class Block(IdentityConfig):\n    type: str\n"
    )
    argv = ["--model.ffn.type", f"{path}:Block", "--print-config"]

    for said in (f"importing '{path}', which runs its code\nmine\n", ""):  # once
        with pytest.raises(SystemExit):
            parse_config(argv, TrainConfig, "train")
        assert capsys.readouterr().err == said


def test_reading_a_config_runs_no_code(reject: Reject, tmp_path: Path) -> None:
    for tag in ("apply:os.mkdir ['hacked']", "object/apply:os.mkdir ['hacked']", "name:os.system"):
        (tmp_path / "mine.yaml").write_text(f"seed: !!python/{tag}")
        reject("--config", "mine.yaml")
    assert not (tmp_path / "hacked").exists()


OWN = {
    "raises": ("1 / 0", "importing '{path}' failed: ZeroDivisionError: division by zero (own.py, line 1)"),
    "lacks a package": (
        "import no_such_package",
        "importing '{path}' failed: ModuleNotFoundError: No module named 'no_such_package' (own.py, line 1)",
    ),
    "ends the program": (
        "import sys\nsys.exit(0)",
        "importing '{path}' failed: SystemExit: 0 (own.py, line 2)",
    ),
    "raises what is no Exception": (
        "class Odd(BaseException): pass\ndef f():\n  raise Odd('two\\nlines')\nf()",
        "importing '{path}' failed: Odd: two (own.py, line 3, in f)",
    ),
    "is no Python": ("\n\ndef (", "importing '{path}' failed: SyntaxError: invalid syntax (own.py, line 3)"),
    "answers for every name": (
        "def __getattr__(name): return 1 // 0",
        "importing '{path}' failed: ZeroDivisionError: integer division or modulo by zero (own.py, line "
        "1, in "
        "__getattr__)",
    ),
    "does not define the class": ("Blok = 3", "'{path}' has no 'Block'; did you mean 'Blok'?"),
    "is no config": ("Block = dict", "'{path}:Block' must be a subclass of FFNConfig, got <class 'dict'>"),
}  # fmt: skip


@pytest.mark.parametrize(("source", "answer"), OWN.values(), ids=OWN)
def test_an_own_class_that_cannot_be_used_is_rejected_by_path(
    reject: Reject, tmp_path: Path, source: str, answer: str
) -> None:
    path = tmp_path / "own.py"
    path.write_text(source)
    said = reject("--model.ffn.type", f"{path}:Block")
    assert said == "model.ffn.type: " + answer.format(path=path)


# -- data


def test_a_sequence_longer_than_the_corpus_is_rejected(
    run_train: Callable[..., Any], tmp_path: Path
) -> None:
    # Only the encoded text has a length, so the cache may exist afterwards; no run does.
    result = run_train(tmp_path, "--data.seq_len", "20000")

    said = [line for line in result.stderr.splitlines() if not line.startswith(PROGRESS)]
    assert (result.code, result.stdout, len(said)) == (2, "", 1)
    assert re.fullmatch(
        r"error: data\.seq_len \(20000\) must be shorter than the train split \(\d+ tokens\): lower "
        r"data\.seq_len, give more text, or change data\.validation_percent",
        said[0],
    )
    assert not (tmp_path / "runs").exists()


# -- the small files of a run


@pytest.mark.parametrize(
    ("name", "content", "answer"),
    [
        ("config.yaml", "sed: 1", "'{path}': sed: unknown; did you mean 'seed'?"),
        ("config.yaml", "[1]", "'{path}': must hold a YAML mapping, got list"),
        ("tokenizer.json", "{", "'{path}' is not the tokenizer that this run was trained with: "
         "Expecting property name enclosed in double quotes: line 1 column 2 (char 1)"),
    ],
)  # fmt: skip
def test_a_damaged_file_of_a_run_is_named(
    moe_run: Any, tmp_path: Path, name: str, content: str, answer: str
) -> None:
    run = shutil.copytree(moe_run.folder, tmp_path / "run")
    (run / name).write_text(content)
    with pytest.raises(ConfigError) as rejected:
        load_model(run)
    assert str(rejected.value) == answer.format(path=run / name, run=run)


def test_the_best_weights_are_preferred_to_the_newest(moe_run: Any, tmp_path: Path) -> None:
    run = shutil.copytree(moe_run.folder, tmp_path / "run")
    newest = run / "checkpoints" / "step_00000006.ckpt"
    values = read_checkpoint(newest)
    for value in values["state_dict"].values():
        value.zero_()
    write_checkpoint(values, newest)

    assert load_model(run).decoder.embedding.weight.count_nonzero()

    (run / "checkpoints" / "best.ckpt").unlink()
    assert not load_model(run).decoder.embedding.weight.count_nonzero(), "where there is no other"


# -- where a run is written


def test_a_file_in_the_place_of_the_output_folder_is_rejected(
    reject: Reject, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("mine")
    assert reject("--run.output_dir", "file") == "run.output_dir: 'file' is a file, not a folder"
    assert (
        reject("--run.output_dir", "file/a/b") == "run.output_dir: 'file' is a file, not a folder"
    )


@pytest.mark.parametrize("content", ["a finished run", None], ids=["with files", "empty"])
def test_an_existing_run_is_never_overwritten(
    reject: Reject, tmp_path: Path, content: str | None
) -> None:
    folder = tmp_path / "runs" / "mine"
    folder.mkdir(parents=True)
    if content is not None:
        (folder / "metrics.jsonl").write_text(content)

    assert reject("--run.name", "mine") == (
        "run.name: 'runs/mine' exists and is never overwritten; choose another name or remove it"
    )


# -- one process holds a run


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_of_runs, "_LOCK_TIMEOUT_SECONDS", 0.1)


@pytest.mark.usefixtures("_impatient")
def test_a_run_is_held_by_one_process(tmp_path: Path) -> None:
    assert is_training(tmp_path) is None, "nobody ever held it"
    with locked(tmp_path):
        with multiprocessing.get_context("fork").Pool(1) as pool:
            assert pool.apply(is_training, [tmp_path])
        with pytest.raises(ConfigError, match=r"is being trained by another process; stop that"):
            locked(tmp_path).__enter__()
    assert is_training(tmp_path) is False


def test_is_training_is_unknown_on_another_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with locked(tmp_path):
        pass
    monkeypatch.setattr("platform.node", lambda: "another")
    assert is_training(tmp_path) is None


@pytest.mark.usefixtures("_impatient")
def test_a_run_stays_held_when_its_lock_file_is_removed(tmp_path: Path) -> None:
    with locked(tmp_path):
        (tmp_path / LOCK_FILE).unlink()
        with pytest.raises(ConfigError, match=r"is being trained by another process"):
            locked(tmp_path).__enter__()
        assert is_training(tmp_path)


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
        assert is_training(tmp_path)
    assert is_training(tmp_path) is False


def test_the_name_of_the_machine_replaces_that_of_another(tmp_path: Path) -> None:
    (tmp_path / LOCK_FILE).write_text("a machine with a much longer name " * 9)
    with locked(tmp_path), multiprocessing.get_context("fork").Pool(1) as pool:
        assert pool.apply(is_training, [tmp_path])


def test_checking_the_lock_does_not_block_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reader holds the lock only for a moment."""
    flock, rejected = fcntl.flock, 3

    def busy(file: int, operation: int) -> None:
        nonlocal rejected
        rejected -= 1
        if rejected >= 0:
            raise BlockingIOError
        flock(file, operation)

    monkeypatch.setattr(fcntl, "flock", busy)

    with locked(tmp_path):
        assert rejected < 0


def test_a_run_whose_folder_cannot_be_written_is_not_held(tmp_path: Path) -> None:
    folder = tmp_path / "gone"
    folder.mkdir()
    shutil.rmtree(folder)
    with locked(folder):
        assert is_training(folder) is None
