"""Two runs of one name, two that prepare the same data, a run and a report of it: nothing is mixed up."""

from __future__ import annotations

import functools
import os
import shutil
import time
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import CONFIG_FILE, make_run_folder
from tests.helpers.same_run import require_same, snapshot
from tests.helpers.tiny_runs import (
    Finished,
    finish,
    fork,
    fork_all,
    options,
    run,
    run_here,
    start,
    write_corpus,
)

PROGRAM_SECONDS = 2.0
"""Seconds from the start of a run to its first step, about."""


def check_ended(ended: list[Finished]) -> None:
    assert [one.code for one in ended] == [0] * len(ended), [one.stderr[-300:] for one in ended]


# -- runs of one name


@pytest.mark.slow
@pytest.mark.parametrize("seconds", [0.0, PROGRAM_SECONDS / 2, PROGRAM_SECONDS])
def test_two_runs_of_one_name(tmp_path: Path, seconds: float) -> None:
    """One trains as if it were alone, the other is refused."""
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
    check_ended([run_here(*options(tmp_path, run__name="alone", seed=winner))])
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


def prepare_in(cache: Path, corpus: Path, percent: int = 5) -> Path:
    """Prepare a corpus with a tokenizer of its own; the folder of the data."""
    config = {
        "corpus": {"type": "text", "paths": [str(corpus)]},
        "cache_dir": str(cache),
        "seq_len": 16,
        "tokenizer": {"type": "bpe", "vocab_size": 512},
        "validation_percent": percent,
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


@pytest.mark.slow
@pytest.mark.parametrize("fifth", [1, 3, 5])
def test_one_of_two_that_prepare_the_same_data_is_killed(tmp_path: Path, fifth: int) -> None:
    """The kill comes after some fifths of the time that building takes; the other process must not notice."""
    corpus, cache, alone = (tmp_path / name for name in ("corpus", "cache", "alone"))
    write_corpus(corpus, 4000)
    for folder in (cache, alone):
        folder.mkdir()
    first = fork(functools.partial(prepare_in, alone, corpus))
    wait_for_building(alone, first)
    began = time.monotonic()
    first.join()
    seconds = time.monotonic() - began

    victim, other = (fork(functools.partial(prepare_in, cache, corpus)) for _ in range(2))
    wait_for_building(cache, victim)
    time.sleep(fifth / 5 * seconds)
    victim.kill()
    other.join()
    victim.join()

    assert (first.exitcode, other.exitcode) == (0, 0)
    left = list(cache.glob(".*"))
    assert len(left) <= 1, f"left: {left}"
    for path in left:  # as old as that of a process that died two days ago
        two_days_ago = time.time() - 2 * 86_400
        for old in (*path.iterdir(), path):
            os.utime(old, (two_days_ago, two_days_ago))
    shutil.rmtree(prepare_in(cache, corpus, percent=7))
    assert not list(cache.glob(".*")), "what a killed process left is never swept"
    assert snapshot(cache) == snapshot(alone)


def wait_for_building(cache: Path, process: ForkProcess) -> None:
    """Until a folder is being built there."""
    while process.is_alive() and not list(cache.glob(".*")):
        time.sleep(0.001)


# -- a run and its page

LONG = {"run__name": "read", "trainer__max_steps": "150", "logging__every_n_steps": "1"}


@pytest.mark.slow
def test_the_report_program_while_a_run_trains(tmp_path: Path) -> None:
    process = start(*options(tmp_path, **LONG))
    read, num_pages = tmp_path / "runs" / "read", 0
    while not (read / CONFIG_FILE).is_file() and process.poll() is None:
        time.sleep(0.01)
    while process.poll() is None:
        ended = run(str(read), program="moe_ffn.cli.report")
        assert (ended.code, ended.stderr) == (0, "")
        html = (read / "report.html").read_text(encoding="utf-8")
        assert html.startswith("<!doctype html>"), html[:80]
        assert html.rstrip().endswith("</html>"), html[-80:]
        num_pages += 1
    check_ended([finish(process)])
    assert num_pages > 0, "the run was over before it was looked at"
