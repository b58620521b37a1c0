"""A long run: memory, open files, step time and logs stay as they are."""

from __future__ import annotations

import functools
import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

from experiments.selftest.case import Case, Chapter
from experiments.selftest.scene import finish, options, start
from moe_ffn.runs.folder import METRICS_FILE

STEPS, SHORT_STEPS = 20_000, 60

EVERYTHING_ON = {
    "model__ffn": (
        "{type: moe, num_experts: 4, router: {type: sigmoid_top_k, correction_bias: true}, "
        "capacity: {factor: 1.0}, shared_expert: {type: swiglu, d_ff: 16}}"
    ),
    "model__dropout": "0.1",
    "logging__every_n_steps": "10",
    "logging__wandb__mode": "offline",
    "trainer__early_stopping": "{patience: 1000}",
}
MOST_GROWTH = 0.01
"""Of resident memory, from the second fifth of the run to the last."""
MOST_SLOWING = 1.1
"""CPU time of a step in the last fifth over that in the second."""
MOST_BYTES_A_ROW = 5_000
"""Of metrics.jsonl, whose rows have some 70 numbers here."""


def cases() -> Iterator[Case]:
    yield Case(f"{SHORT_STEPS} steps: open files and logs", _short, short=True)
    yield Case(f"{STEPS:,} steps with everything on", functools.partial(_long, STEPS))


CHAPTER = Chapter(
    "endurance",
    "In 20,000 steps with everything on memory grows by less than 1 %, no file stays open, steps take as "
    "long as at first, and logs grow by rows alone.",
    cases,
)


@dataclass(frozen=True)
class Look:
    """A process at one moment."""

    step: int
    resident_bytes: int
    open_files: int
    cpu_seconds: float


def _short(folder: Path) -> str:
    looks = _watch(folder, SHORT_STEPS, every_seconds=0.1)
    return f"{_require_closed_files(looks)}; {_require_bounded_logs(folder, SHORT_STEPS)}"


def _long(steps: int, folder: Path) -> str:
    looks = _watch(folder, steps, every_seconds=1)
    early, late = _fifth(looks, steps, 2), _fifth(looks, steps, 5)
    memory = median(look.resident_bytes for look in late) / median(
        look.resident_bytes for look in early
    )
    assert memory < 1 + MOST_GROWTH, f"memory grew by {memory - 1:.2%}"
    slowing = _seconds_per_step(late) / _seconds_per_step(early)
    assert slowing < MOST_SLOWING, f"a step takes {slowing:.2f} times as long as at first"
    return "; ".join(
        (
            f"memory {memory - 1:+.2%}",
            f"step time {slowing - 1:+.1%}",
            _require_closed_files(early + late),
            _require_bounded_logs(folder, steps),
        )
    )


def _watch(folder: Path, steps: int, every_seconds: float) -> list[Look]:
    """Train for so many steps, looking at the process all the while."""
    argv = options(
        folder,
        **EVERYTHING_ON,
        run__name="long",
        trainer__max_steps=str(steps),
        trainer__validate_every_n_steps=str(steps // 20),
        checkpoints__every_n_steps=str(steps // 40),
    )
    process = start(*argv)
    looks: list[Look] = []
    while process.poll() is None:
        if look := _look(process, folder / "runs/long" / METRICS_FILE):
            looks.append(look)
        time.sleep(every_seconds)
    ended = finish(process)
    assert ended.code == 0, ended.stderr
    return looks


def _look(process: subprocess.Popen[str], metrics: Path) -> Look | None:
    """None before the first row, and after the end."""
    proc = Path("/proc") / str(process.pid)
    try:
        with metrics.open("rb") as file:
            file.seek(max(file.seek(0, os.SEEK_END) - 10_000, 0))
            line = file.read().splitlines()[-2]
        resident = next(
            row for row in (proc / "status").read_text().splitlines() if row.startswith("VmRSS")
        )
        times = (proc / "stat").read_text().rpartition(")")[2].split()
        return Look(
            step=int(line.partition(b",")[0]),
            resident_bytes=int(resident.split()[1]) * 1024,
            open_files=len(list((proc / "fd").iterdir())),
            cpu_seconds=(int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK"),
        )
    except (OSError, ValueError, IndexError, StopIteration):
        return None


def _fifth(looks: Sequence[Look], steps: int, number: int) -> list[Look]:
    found = [look for look in looks if (number - 1) * steps / 5 < look.step <= number * steps / 5]
    assert len(found) > 2, f"only {len(found)} looks at fifth {number}"
    return found


def _seconds_per_step(looks: Sequence[Look]) -> float:
    first, last = looks[0], looks[-1]
    return (last.cpu_seconds - first.cpu_seconds) / (last.step - first.step)


def _require_closed_files(looks: Sequence[Look]) -> str:
    """A file may be open at the moment of a look, so what counts is the least of each half."""
    assert len(looks) > 3, f"only {len(looks)} looks"
    half = len(looks) // 2
    before, after = (min(look.open_files for look in part) for part in (looks[:half], looks[half:]))
    assert after <= before, f"{before} open files became {after}"
    return f"{after} open files"


def _require_bounded_logs(folder: Path, steps: int) -> str:
    run_folder = folder / "runs/long"
    rows = steps // 10 + 20
    size = (run_folder / METRICS_FILE).stat().st_size
    assert size < rows * MOST_BYTES_A_ROW, f"metrics.jsonl has {size / rows:.0f} bytes a row"
    others = {
        path: path.stat().st_size
        for path in run_folder.glob("*")
        if path.is_file() and path.name not in (METRICS_FILE, "report.html")
    }
    assert sum(others.values()) < 200_000, f"other files: {others}"
    checkpoints = len(list((run_folder / "checkpoints").iterdir()))
    assert checkpoints == 3, f"{checkpoints} checkpoints are kept, and not the last 2 and the best"
    return f"{size / rows:.0f} bytes a row"
