"""In 20,000 steps with everything on memory grows by less than 1 %, no file stays open, steps take as long
as at first, and logs grow by rows alone.
"""

from __future__ import annotations

import gc
import os
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import pytest

from moe_ffn.runs.folder import METRICS_FILE
from tests.helpers.tiny_runs import finish, losses, options, run_here, start, trained

STEPS = 20_000
FEW_STEPS = 30
MAX_GROWTH = 0.01
"""Of resident memory, from the second fifth of the run to the last."""
MAX_SLOWING = 1.1
"""CPU time of a step in the last fifth over that in the second."""
MAX_BYTES_A_ROW = 5_000
"""Of the metrics, whose rows have some 70 numbers here."""

SECONDS_BETWEEN_LOOKS = 3

EVERYTHING_ON = {
    "run__name": "long",
    "model__ffn": (
        "{type: moe, num_experts: 4, router: {type: sigmoid_top_k, correction_bias: true}, "
        "capacity: {factor: 1.0}, shared_expert: {type: swiglu, d_ff: 16}}"
    ),
    "model__dropout": "0.1",
    "logging__every_n_steps": "10",
    "trainer__early_stopping": "{patience: 1000}",
}


def everything_on(folder: Path, steps: int, num_validations: int, **changes: str) -> list[str]:
    often = {
        "trainer__max_steps": str(steps),
        "trainer__validate_every_n_steps": str(steps // num_validations),
        "checkpoints__every_n_steps": str(steps // (2 * num_validations)),
    }
    return options(folder, **EVERYTHING_ON, **often, **changes)


def check_logs(folder: Path, steps: int) -> float:
    """Nothing of a run grows but by its rows; returns the bytes of one."""
    rows = steps // 10 + 20
    size = (folder / METRICS_FILE).stat().st_size
    assert size < rows * MAX_BYTES_A_ROW, f"{METRICS_FILE} has {size / rows:.0f} bytes a row"
    rest = {
        path.name: path.stat().st_size
        for path in folder.glob("*")
        if path.is_file() and path.name not in (METRICS_FILE, "report.html")
    }
    assert sum(rest.values()) < 200_000, f"the other files: {rest}"
    checkpoints = len(list((folder / "checkpoints").iterdir()))
    assert checkpoints == 3, f"{checkpoints} checkpoints are kept, and not the last 2 and the best"
    return size / rows


def num_open_files(process: int | str = "self") -> int:
    return len(list(Path(f"/proc/{process}/fd").iterdir()))


def test_a_short_run_leaves_no_file_open(tmp_path: Path) -> None:
    trained()  # so that all is imported
    gc.collect()  # memory maps, which are open files
    before = num_open_files()

    done = run_here(*everything_on(tmp_path, FEW_STEPS, 3))

    assert done.code == 0, done.stderr
    gc.collect()
    assert num_open_files() <= before
    check_logs(tmp_path / "runs/long", FEW_STEPS)
    assert list(losses(tmp_path / "runs/long")) == list(range(10, FEW_STEPS + 1, 10))


# -- a process that is looked at


@dataclass(frozen=True)
class Look:
    """A process at one moment."""

    step: int
    resident_bytes: int
    open_files: int
    cpu_seconds: float


@pytest.mark.slow
def test_a_long_run(tmp_path: Path, record_property: Callable[[str, object], None]) -> None:
    looks = watch(tmp_path, STEPS)
    early, late = fifth(looks, 2), fifth(looks, 5)

    first, last = (median(look.resident_bytes for look in part) for part in (early, late))
    memory = last / first
    assert memory < 1 + MAX_GROWTH, f"memory grew by {memory - 1:.2%}"
    slowing = seconds_per_step(late) / seconds_per_step(early)
    assert slowing < MAX_SLOWING, f"a step takes {slowing:.2f} times as long as at first"
    # A file may be open at the moment of a look, so what counts is the least of each part.
    before, after = (min(look.open_files for look in part) for part in (early, late))
    assert after <= before, f"{before} open files became {after}"
    bytes_a_row = check_logs(tmp_path / "runs/long", STEPS)
    record_property(
        "measured",
        f"{STEPS:,} steps: memory {memory - 1:+.2%}, step time {slowing - 1:+.1%}, {after} open files, "
        f"{bytes_a_row:.0f} bytes a row",
    )


def watch(folder: Path, steps: int) -> list[Look]:
    """Train for so many steps, looking at the process all the while."""
    process = start(*everything_on(folder, steps, 20, logging__wandb__mode="offline"))
    looks: list[Look] = []
    while process.poll() is None:
        if look := look_at(process, folder / "runs/long"):
            looks.append(look)
        time.sleep(SECONDS_BETWEEN_LOOKS)
    ended = finish(process)
    assert ended.code == 0, ended.stderr
    return looks


def look_at(process: subprocess.Popen[str], folder: Path) -> Look | None:
    """None before the first row, and after the end."""
    proc = Path(f"/proc/{process.pid}")
    try:
        status = dict(
            line.split(":", 1) for line in (proc / "status").read_text().splitlines() if ":" in line
        )
        times = (proc / "stat").read_text().rpartition(")")[2].split()
        return Look(
            step=max(losses(folder)),
            resident_bytes=int(status["VmRSS"].split()[0]) * 1024,
            open_files=num_open_files(process.pid),
            cpu_seconds=(int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"),
        )
    except (OSError, ValueError, KeyError):
        return None


def fifth(looks: Sequence[Look], number: int) -> list[Look]:
    found = [look for look in looks if (number - 1) * STEPS / 5 < look.step <= number * STEPS / 5]
    assert len(found) > 2, f"only {len(found)} looks at fifth {number}"
    return found


def seconds_per_step(looks: Sequence[Look]) -> float:
    first, last = looks[0], looks[-1]
    return (last.cpu_seconds - first.cpu_seconds) / (last.step - first.step)
