"""The real client in this process: a resumed run.

In whole runs of the program, it is in `tests/cli/test_train_wandb.py`.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.cut import Cut, cutting
from tests.helpers.fake_wandb import history, inspect
from tests.helpers.tiny_runs import options, run_here

pytestmark = pytest.mark.usefixtures("nobodys_wandb")


@pytest.fixture
def real_wandb() -> Iterator[Any]:
    import wandb

    yield wandb
    wandb.teardown()


def test_a_resumed_run_resumes_its_wandb_run(real_wandb: Any, tmp_path: Path) -> None:
    argv = options(
        tmp_path,
        run__name="run",
        logging__wandb__mode="offline",
        logging__every_n_steps="1",
        trainer__max_steps="4",
        trainer__validate_every_n_steps="2",
    )
    with cutting(Cut("asked to end in a validation", 2, within="validation_step")):
        assert run_here(*argv).code == 143
    real_wandb.teardown()
    done = run_here("--resume", str(tmp_path / "runs/run"))
    assert done.code == 0, done.stderr

    folders = sorted((tmp_path / "runs/run/wandb").glob("offline-run-*"))
    first, second = [inspect(folder, dict(os.environ)) for folder in folders]
    ids = {r["run"]["run_id"] for r in [*first, *second] if r["type"] == "run"}
    assert len(ids) == 1
    rows = history([*first, *second])
    steps = {"train/loss": [1, 2, 3, 4], "validation/loss": [2, 4]}
    for key, expected in steps.items():
        assert [row["trainer/global_step"] for row in rows if key in row] == expected, key
    assert len(rows) == 4 + 2
