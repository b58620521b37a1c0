"""The runs of a sweep, with fake processes that a test ends: number, order, progress and leftovers."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from moe_ffn.config.trust import FLAG
from moe_ffn.config.yaml_files import parse_yaml, to_yaml, validate
from moe_ffn.studies import sweep as sweep_module
from moe_ffn.studies.config import StudyConfig
from moe_ffn.studies.sweep import Job, Sweep

STUDY = """
name: gating
config: {model: {d_model: 16, num_layers: 1, attention.num_heads: 2}, trainer.max_steps: 10}
arms: {short: {}, long: {trainer.max_steps: 20}}
"""


class Process:
    """Fake process of a run."""

    started: ClassVar[list[Process]] = []

    def __init__(self, command: Sequence[str], **given: Any) -> None:
        self.command, self.log = command, Path(given["stdout"].name)
        self.code: int | None = None
        Process.started.append(self)

    def poll(self) -> int | None:
        return self.code


@pytest.fixture(autouse=True)
def _no_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    Process.started.clear()
    monkeypatch.setattr(sweep_module, "Popen", Process)


def sweep_of(text: str, **given: Any) -> Sweep:
    return Sweep(validate(StudyConfig, parse_yaml(text, "study")).planned_runs(), **given)


def begin(job: Job, *steps: int) -> None:
    """Write what a run leaves that has come to its last of `steps`."""
    job.run.folder.mkdir(parents=True, exist_ok=True)
    (job.run.folder / "config.yaml").write_text(to_yaml(job.run.config))
    rows = "".join(f'{{"step": {step}, "train/loss": 2.0}}\n' for step in steps)
    (job.run.folder / "metrics.jsonl").write_text(rows)


def end(job: Job, process: Process, code: int = 0) -> None:
    begin(job)
    if code == 0:
        (job.run.folder / "summary.json").write_text('{"validation_loss": 2.0}')
    process.code = code


def test_a_sweep_trains_the_requested_number_of_runs_at_once() -> None:
    study = (
        f"{STUDY}seeds: [0, 1]\ntuning: {{seeds: [0], grid: {{optimizer.learning_rate: [0.5]}}}}"
    )
    sweep = sweep_of(study, num_at_once=2)
    names = [job.name for job in sweep.jobs]
    assert len(names) == 6

    assert len([*sweep.advance()]) == 2
    assert [*sweep.advance()] == []
    assert [job.name for job in sweep.jobs_in("training")] == names[:2]
    end(sweep.jobs[1], Process.started[1])
    lines = [*sweep.advance()]
    assert lines[0].startswith(f"{names[1]}: 0 s, loss 2.0000; 5 left")
    assert lines[1] == f"{names[2]}: training (3 of 6)"
    assert [job.state for job in sweep.jobs] == [
        *("training", "finished", "training", "waiting", "waiting", "waiting")
    ]
    while not sweep.is_done:
        for job, process in zip(sweep.jobs, Process.started, strict=False):
            end(job, process)
        list(sweep.advance())
    assert [process.log for process in Process.started] == [
        Path(f"runs/gating/logs/{name}.log") for name in names
    ]


def test_a_process_that_ends_well_and_leaves_no_result_has_failed() -> None:
    sweep = sweep_of(STUDY)
    list(sweep.advance())
    Process.started[0].code = 0

    lines = [*sweep.advance()]

    problem = "failed (exit code 0); its output is in runs/gating/logs/short-seed0.log"
    assert lines[0].startswith(f"short-seed0: {problem}")
    assert (sweep.jobs[0].state, sweep.jobs[0].problem) == ("failed", problem)


def test_the_time_left_is_at_the_speed_of_this_sweep_in_flops(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(sweep_module, "time", SimpleNamespace(monotonic=lambda: now))
    sweep = sweep_of(STUDY)
    short, long = sweep.jobs
    begin(short, 1, 2, 4)
    assert [*sweep.advance()] == ["short-seed0: resuming (1 of 2)"]
    assert sweep.seconds_left is None, "it has no speed yet"

    begin(short, 1, 2, 4, 5, 6)
    now += 20

    # Two steps of the short run took 20 seconds; 4 of 10 are left of it, and all 20 of the long one.
    assert short.step == 6
    assert sweep.seconds_left == pytest.approx((4 + 20) * 10)
    assert sweep.progress == "short-seed0: step 6 of 10; about 4 min left"
    end(short, Process.started[0])
    now += 20
    # Six steps took 40 seconds, and twenty are left: 133 seconds.
    assert next(sweep.advance()).endswith("; 1 left, about 2 min")
    list(sweep.advance())
    assert long.state == "training"


def test_runs_abandoned_by_another_sweep_wait_for_a_free_slot(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    now = 100.0
    monkeypatch.setattr(sweep_module, "time", SimpleNamespace(monotonic=lambda: now))
    is_held = True
    monkeypatch.setattr(
        sweep_module.run_folder,
        "is_training",
        lambda folder: is_held and folder.name == "short-seed0",
    )
    sweep = sweep_of(STUDY)

    assert [line.partition(":")[0] for line in sweep.advance()] == ["short-seed0", "long-seed0"]
    assert [job.state for job in sweep.jobs] == ["elsewhere", "training"]
    is_held = False
    now += 10
    assert [*sweep.advance()] == []
    assert [job.state for job in sweep.jobs] == ["elsewhere", "training"]
    end(sweep.jobs[1], Process.started[0])
    now += 10
    list(sweep.advance())
    assert [job.state for job in sweep.jobs] == ["training", "finished"]


def test_a_resumed_run_is_trusted_as_the_sweep_is() -> None:
    for trusts in (True, False):
        sweep = sweep_of(STUDY, trust_code=trusts)
        begin(sweep.jobs[0], 1)
        list(sweep.advance())
        assert "--resume" in Process.started[-1].command
        assert (FLAG in Process.started[-1].command) == trusts
