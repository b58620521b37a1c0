"""A sweep can be killed at any moment, its runs too: the next one loses no run and repeats none."""

from __future__ import annotations

import os
import random
import re
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib import import_module
from multiprocessing.context import ForkProcess
from pathlib import Path

import pytest

from moe_ffn.cli import sweep
from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.runs.folder import is_finished
from tests.helpers.same_run import require_same
from tests.helpers.tiny_runs import ForkedTraining, fork, options

STUDY = """
seeds: [0, 1]
arms:
  dense: {model.ffn: {type: dense, d_ff: 32}}
  moe: {model.ffn: {type: moe, num_experts: 4}}
"""
NUM_KILLS = 10
RUNS = ["dense-seed0", "dense-seed1", "moe-seed0", "moe-seed1"]


class Recorded(ForkedTraining):
    """A process whose number is written to a file, for somebody to kill it."""

    def __init__(self, command: list[str], **given: object) -> None:
        super().__init__(command, **given)
        Path("pids", str(self.pid)).touch()


pytestmark = pytest.mark.skipif(not Path("/proc/self/cwd").exists(), reason="only Linux has /proc")


@pytest.fixture
def scene(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a study; at the end no process of it is left."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("moe_ffn.studies.sweep.Popen", Recorded)
    import_module("moe_ffn.runs.train.run")  # which each copy of this process has then
    Path("gating.yaml").write_text(STUDY)
    Path("pids").mkdir()
    yield tmp_path
    for number in pids():
        kill(number)


def pids() -> list[int]:
    """The runs that are alive, which are known by their folder: a number may have gone to another."""
    found: list[int] = []
    for path in Path("pids").iterdir():
        with suppress(OSError):
            if Path(f"/proc/{path.name}/cwd").readlink() == Path.cwd():
                found.append(int(path.name))
    return found


def kill(number: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(number, signal.SIGKILL)


def start(folder: Path, log: str, *flags: str) -> ForkProcess:
    def work() -> None:
        given = options(folder, logging__every_n_steps="1", checkpoints__every_n_steps="3")
        sys.argv = ["sweep", "--config", "gating.yaml", "--jobs", "2", *flags, *given]
        with Path(log).open("a", 1) as file:
            sys.stdout = sys.stderr = file
            raise SystemExit(exit_on_bad_input(sweep.main))

    return fork(work)


def finished_at(study: Path) -> dict[str, int]:
    """The runs that are finished, and when they were."""
    folders = [study / name for name in RUNS]
    return {
        path.name: (path / "summary.json").stat().st_mtime_ns
        for path in folders
        if is_finished(path)
    }


@pytest.mark.slow
def test_kills_at_any_moment_lose_no_run_and_repeat_none(scene: Path) -> None:
    whole = start(scene, "whole.txt", "--name", "whole")
    whole.join()
    assert whole.exitcode == 0, Path("whole.txt").read_text()
    moments = random.Random(1)
    met = studies = 0

    while met < NUM_KILLS:  # a study that is done before is followed by another one
        studies += 1
        met += kill_until_done(scene, f"study{studies}", moments, NUM_KILLS - met)


def kill_until_done(scene: Path, name: str, moments: random.Random, at_most: int) -> int:
    """Train a study, killed at random moments; how many kills met a sweep that was not done."""
    study, done, met = Path("runs", name), dict[str, int](), 0
    while met < at_most and len(done) < len(RUNS):
        process = start(scene, "killed.txt", "--name", name)
        process.join(timeout=moments.uniform(0.1, 2.0))
        met += process.exitcode is None
        target = moments.choice(["sweep", "run", "both"])
        if target != "run":
            assert process.pid is not None
            kill(process.pid)
        if target != "sweep":
            for number in pids()[-1:] if target == "run" else pids():
                kill(number)
        process.join(timeout=60)
        assert process.exitcode is not None
        now = finished_at(study)
        assert {name: now[name] for name in done} == done, "a finished run was trained again"
        done = now

    last = start(scene, "last.txt", "--name", name)
    last.join()

    assert last.exitcode == 0, Path("last.txt").read_text()
    now = finished_at(study)
    assert sorted(now) == RUNS
    assert {name: now[name] for name in done} == done
    folders = sorted(path.name for path in study.iterdir() if path.name[0] != ".")
    assert folders == [*RUNS[:2], "logs", *RUNS[2:], "plotly.min.js", "study.yaml"], (
        "nothing was set aside"
    )
    for run in RUNS:
        require_same(Path("runs/whole", run), study / run)
    return met


def test_the_next_sweep_waits_for_the_runs_of_one_that_was_killed(scene: Path) -> None:
    first = start(scene, "first.txt", "--trainer.max_steps", "40")
    deadline = time.monotonic() + 60
    rows = [Path("runs/gating", name, "metrics.jsonl") for name in ("dense-seed0", "moe-seed0")]
    while not all(path.exists() for path in rows):  # so both hold their folder
        assert time.monotonic() < deadline
        time.sleep(0.02)
    runs = pids()
    for number in runs:  # so that they do not end before the next sweep looks
        os.kill(number, signal.SIGSTOP)
    assert first.pid is not None
    kill(first.pid)
    first.join()

    Path("second.txt").touch()
    second = start(scene, "second.txt", "--trainer.max_steps", "40")
    deadline = time.monotonic() + 60
    while Path("second.txt").read_text().count("waiting for it\n") != 2:
        assert time.monotonic() < deadline
        time.sleep(0.02)
    for number in runs:
        os.kill(number, signal.SIGCONT)
    second.join()

    printed = Path("second.txt").read_text()
    assert second.exitcode == 0, printed
    for name in ("dense-seed0", "moe-seed0"):
        assert f"{name}: is being trained by another process; waiting for it\n" in printed
        assert f"{name}: was trained by another process\n" in printed
    assert re.findall(r"^(\S+): training", printed, re.MULTILINE) == ["dense-seed1", "moe-seed1"]
    assert sorted(finished_at(Path("runs/gating"))) == RUNS
