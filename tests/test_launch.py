"""The script for SLURM: it starts a run, resumes it and queues it again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "configs/launch/slurm.sh"
STUB = """#!/bin/bash
echo "$(basename "$0") $*" >> calls
exit ${CODE:-0}
"""


def submit(where: Path, *argv: str, code: int = 0) -> tuple[int, list[str]]:
    """The script as `sbatch` runs it, with programs of SLURM that note how they are called."""
    (where / "bin").mkdir()
    for name in ("srun", "scontrol"):
        (where / "bin" / name).write_text(STUB)
        (where / "bin" / name).chmod(0o755)
    given = {"SLURM_NNODES": "2", "SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_ID": "7"}
    done = subprocess.run(
        ["bash", SCRIPT, *argv],
        cwd=where,
        env={"PATH": f"{where / 'bin'}:{os.environ['PATH']}", "CODE": str(code), **given},
        capture_output=True,
        text=True,
        check=False,
    )
    calls = where / "calls"
    return done.returncode, calls.read_text().splitlines() if calls.exists() else [done.stderr]


OPTIONS = ("my-run", "--config", "configs/moe.yaml", "--parallel.shard", "8")
GIVEN = "--config configs/moe.yaml --parallel.shard 8 --trainer.num_nodes 2 --trainer.devices 8"


@pytest.mark.parametrize("is_started", [False, True])
def test_a_new_run_is_named_and_a_started_one_resumed(tmp_path: Path, is_started: bool) -> None:
    if is_started:
        (tmp_path / "runs/my-run").mkdir(parents=True)
        (tmp_path / "runs/my-run/config.yaml").touch()
    which = "--resume runs/my-run" if is_started else "--run.name my-run"
    expected = f"srun python -m experiments.train {which} {GIVEN}"
    assert submit(tmp_path, *OPTIONS) == (0, [expected])


@pytest.mark.parametrize(("code", "is_queued_again"), [(143, True), (1, False), (3, False)])
def test_only_a_run_that_was_asked_to_end_is_queued_again(
    tmp_path: Path, code: int, is_queued_again: bool
) -> None:
    found, calls = submit(tmp_path, *OPTIONS, code=code)
    assert found == code
    assert calls[1:] == (["scontrol requeue 7"] if is_queued_again else [])


def test_a_run_without_a_name_is_refused(tmp_path: Path) -> None:
    code, said = submit(tmp_path)
    assert code != 0
    assert "give the name of the run, then its options" in said[0]
