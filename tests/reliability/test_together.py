"""Runs that share a name or a corpus are kept apart; a run leaves no file open."""

from __future__ import annotations

import functools
import gc
import os
import shutil
from pathlib import Path

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import (
    CONFIG_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    make_run_folder,
)
from moe_ffn.training.recovery.checkpoint_file import read_checkpoint, write_checkpoint
from tests.helpers.same_run import differences, snapshot
from tests.helpers.synthetic_run import change
from tests.helpers.tiny_runs import (
    NEWEST,
    finished_copy,
    fork_all,
    options,
    run_here,
    trained,
    write_corpus,
)

# -- runs of one name


@pytest.mark.parametrize("is_named", [True, False], ids=["named", "not named"])
def test_two_processes_make_folders_as_fast_as_they_can(tmp_path: Path, is_named: bool) -> None:
    number = 30

    def make(which: int) -> None:
        said = []
        for place in range(number):
            name = {"name": f"run-{place}"} if is_named else {}
            run = {"output_dir": str(tmp_path / "runs"), **name}
            config = TrainConfig.model_validate({"run": run})
            try:
                said.append(make_run_folder(config, {CONFIG_FILE: str(place)}).name)
            except ConfigError as error:
                said.append(str(error))
        (tmp_path / f"{which}.txt").write_text("\n".join(said))

    assert fork_all(functools.partial(make, which) for which in range(2)) == [0, 0]

    said = [
        line for which in range(2) for line in (tmp_path / f"{which}.txt").read_text().split("\n")
    ]
    made = [line for line in said if not line.startswith("run.name: ")]
    assert len(set(made)) == len(made) == (number if is_named else 2 * number)
    assert len(said) == 2 * number
    assert all("exists and is never overwritten" in line for line in said if line not in made)
    assert {path.name for path in (tmp_path / "runs").iterdir()} == set(made)


# -- one corpus


def prepare_in(cache: Path, corpus: Path) -> Path:
    """Prepare a corpus with a trained tokenizer, and return the folder of the data."""
    config = {
        "corpus": {"type": "text", "paths": [str(corpus)]},
        "cache_dir": str(cache),
        "seq_len": 16,
        "tokenizer": {"type": "bpe", "vocab_size": 512},
    }
    return prepare(DataConfig.model_validate(config)).folder


@pytest.mark.parametrize("state", ["no cache", "a damaged cache"])
@pytest.mark.parametrize("number", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_processes_that_prepare_the_same_data(tmp_path: Path, number: int, state: str) -> None:
    """The processes leave the same bytes as one process alone, and nothing else."""
    corpus, cache = write_corpus(tmp_path / "corpus", 100), tmp_path / "cache"
    for file in corpus.iterdir():
        os.utime(file, (1e9, 1e9))  # of files that have just changed, no note is kept
    alone = prepare_in(tmp_path / "alone", corpus).parent
    if state == "a damaged cache":
        shutil.copytree(alone, cache)
        (next(cache.iterdir()) / "train.bin").write_bytes(b"")

    assert fork_all([functools.partial(prepare_in, cache, corpus)] * number) == [0] * number

    assert snapshot(cache) == snapshot(alone)


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_run_leaves_no_file_open(tmp_path: Path) -> None:
    trained()  # so that all is imported
    gc.collect()  # memory maps, which are open files
    before = num_open_files()

    done = run_here(*options(tmp_path, trainer__early_stopping="{patience: 1000}"))

    assert done.code == 0, done.stderr
    gc.collect()
    assert num_open_files() <= before


def test_a_last_digit_of_a_weight_is_a_difference_and_durations_are_none(tmp_path: Path) -> None:
    other = finished_copy(tmp_path)
    change(other / SUMMARY_FILE, tokens_per_second=1)
    assert differences(trained(), other) == []

    path = other / "checkpoints" / NEWEST
    values = read_checkpoint(path)
    weight = next(iter(values["state_dict"].values()))
    weight.view(-1)[3] = weight.view(-1)[3].nextafter(weight.new_tensor(9.0))
    write_checkpoint(values, path)
    assert differences(trained(), other)[0].startswith(f"{NEWEST}/state_dict")


@pytest.mark.parametrize(
    ("name", "digit"), [(METRICS_FILE, "0"), (SAMPLES_FILE, "8"), (SUMMARY_FILE, "0")]
)
def test_another_digit_is_a_difference(tmp_path: Path, name: str, digit: str) -> None:
    other = finished_copy(tmp_path)
    text = (other / name).read_text()
    (other / name).write_text(text.replace(digit, "1", 1))

    assert differences(trained(), other)[0].startswith(name)
