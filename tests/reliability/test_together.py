"""Two runs of one name, and two that prepare the same data: nothing is mixed up."""

from __future__ import annotations

import functools
import shutil
import time
from pathlib import Path

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import CONFIG_FILE, make_run_folder
from tests.helpers.same_run import require_same, snapshot
from tests.helpers.tiny_runs import (
    finish,
    fork_all,
    options,
    run_here,
    start,
    write_corpus,
)

# -- runs of one name


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, 1.0, 2.0])  # the first step comes after some two seconds
def test_two_runs_of_one_name(tmp_path: Path, seconds: float) -> None:
    processes = {}
    for seed in ("1", "2"):
        processes[seed] = start(*options(tmp_path, run__name="mine", seed=seed))
        time.sleep(seconds if seed == "1" else 0)

    ended = {seed: finish(process) for seed, process in processes.items()}

    assert sorted(one.code for one in ended.values()) == [0, 2], ended
    (winner,) = (seed for seed, one in ended.items() if one.code == 0)
    (refused,) = (one for one in ended.values() if one.code == 2)
    (line,) = refused.own_lines
    assert line.startswith("error: run.name: '"), line
    assert "exists and is never overwritten" in line, line
    assert run_here(*options(tmp_path, run__name="alone", seed=winner)).code == 0
    runs = tmp_path / "runs"
    assert snapshot(runs / "mine").keys() == snapshot(runs / "alone").keys()
    require_same(runs / "alone", runs / "mine")
    assert {path.name for path in runs.iterdir()} == {"mine", "alone"}


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
    """Prepare a corpus with a tokenizer of its own; the folder of the data."""
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
    alone = prepare_in(tmp_path / "alone", corpus).parent
    if state == "a damaged cache":
        shutil.copytree(alone, cache)
        (next(cache.iterdir()) / "train.bin").write_bytes(b"")

    assert fork_all([functools.partial(prepare_in, cache, corpus)] * number) == [0] * number

    assert snapshot(cache) == snapshot(alone)
