"""A run leaves no file open, and its logs grow by rows alone."""

from __future__ import annotations

import gc
from pathlib import Path

from moe_ffn.runs.folder import METRICS_FILE
from tests.helpers.tiny_runs import losses, options, run_here, trained

STEPS = 30
MAX_BYTES_PER_ROW = 5_000
"""Largest size of a row of the metrics, which has some 70 numbers here."""

EVERYTHING_ON = {
    "run__name": "long",
    "model__ffn": (
        "{type: moe, num_experts: 4, router: {type: sigmoid_top_k, correction_bias: true}, "
        "capacity: {factor: 1.0}, shared_expert: {type: swiglu, d_ff: 16}}"
    ),
    "model__dropout": "0.1",
    "logging__every_n_steps": "10",
    "trainer__early_stopping": "{patience: 1000}",
    "trainer__max_steps": str(STEPS),
    "trainer__validate_every_n_steps": "10",
    "checkpoints__every_n_steps": "5",
}


def num_open_files() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_a_run_leaves_no_file_open(tmp_path: Path) -> None:
    trained()  # so that all is imported
    gc.collect()  # memory maps, which are open files
    before = num_open_files()

    done = run_here(*options(tmp_path, **EVERYTHING_ON))

    assert done.code == 0, done.stderr
    gc.collect()
    assert num_open_files() <= before
    folder = tmp_path / "runs/long"
    assert list(losses(folder)) == list(range(10, STEPS + 1, 10))
    assert (folder / METRICS_FILE).stat().st_size < (STEPS // 10 + 20) * MAX_BYTES_PER_ROW
    assert len(list((folder / "checkpoints").iterdir())) == 3, "the last two and the best"
