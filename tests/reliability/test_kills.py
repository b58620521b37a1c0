"""A run that is killed by SIGINT, SIGTERM or SIGKILL, at any moment, and resumed ends equal to the unbroken
one; its exit code says that it was not finished.
"""

from __future__ import annotations

import functools
import random
import re
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.helpers.cut import killing
from tests.helpers.same_run import require_same
from tests.helpers.tiny_runs import (
    WITH_ALARMS,
    Finished,
    finish,
    fork_all,
    lasting_folder,
    on_terminal,
    options,
    run,
    run_here,
    start,
    start_script,
    trained,
    wait_for_row,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
TIMES_IN_TRAINING, TIMES_BEFORE = 20, 4
"""Number of kills by each signal at random times, during training and before the first step."""

MAX_STEPS, ROWS_EVERY = 40, 2
CHANGES = {
    "run__name": "killed",
    "logging__every_n_steps": str(ROWS_EVERY),
    "model__ffn": "{type: moe, num_experts: 4, router: {type: sigmoid_top_k, jitter: 0.1}}",
    "model__dropout": "0.1",
    "trainer__max_steps": str(MAX_STEPS),
    "trainer__validate_every_n_steps": "5",
    "checkpoints__every_n_steps": "3",
}


def times(signum: signal.Signals, number: int, seed: str) -> list[object]:
    """Random numbers from 0 to 1, the same every time."""
    drawn = random.Random(f"{seed}, {signum.name}")
    return [
        pytest.param(signum, drawn.random(), id=f"{signum.name}, {place} of {number}")
        for place in range(1, number + 1)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "part"), [case for s in SIGNALS for case in times(s, TIMES_IN_TRAINING, "training")]
)
def test_killed_in_training(tmp_path: Path, signum: signal.Signals, part: float) -> None:
    """The signal comes after `part` of the steps and a moment more, so anywhere in a step."""
    row, moment = divmod(part * MAX_STEPS, ROWS_EVERY)
    process = start(*options(tmp_path, **CHANGES))
    if row:
        wait_for_row(tmp_path / "runs/killed", int(row) * ROWS_EVERY, process)
    else:
        wait_for_folder(tmp_path / "runs/killed", process)
    time.sleep(moment / ROWS_EVERY * 0.1)
    process.send_signal(signum)

    check_going_on(finish(process), signum, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("signum", "part"), [case for s in SIGNALS for case in times(s, TIMES_BEFORE, "before")]
)
def test_killed_before_training(tmp_path: Path, signum: signal.Signals, part: float) -> None:
    """The signal comes after `part` of the time until the first step."""
    seconds = part * seconds_to_begin()
    process = start(*options(tmp_path, **CHANGES))
    time.sleep(seconds)
    process.send_signal(signum)

    check_going_on(finish(process), signum, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("moment", "nth"), [("update", 33), ("save", 4)], ids=["update", "save"])
@pytest.mark.parametrize("signum", SIGNALS, ids=lambda signum: signum.name)
def test_killed_in_the_middle_of_an_update_or_a_save(
    tmp_path: Path, moment: str, nth: int, signum: signal.Signals
) -> None:
    argv = (moment, signum.name, str(nth), *options(tmp_path, **CHANGES))

    check_going_on(finish(start_script("cut.py", *argv)), signum, tmp_path)


def test_a_copy_of_this_process_is_killed_in_the_middle_of_a_save(tmp_path: Path) -> None:
    argv = options(tmp_path, run__name="run", **WITH_ALARMS)

    def train() -> None:
        with killing("save", signal.SIGKILL, 3):
            run_here(*argv)

    assert fork_all([train]) == [-signal.SIGKILL]
    assert list(tmp_path.rglob("*.unfinished"))

    done = run_here("--resume", str(tmp_path / "runs/run"))

    assert done.code == 0, done.stderr
    assert " after step " in done.stdout
    require_same(trained(), tmp_path / "runs/run")
    assert not list(tmp_path.rglob("*.unfinished"))


def check_going_on(killed: Finished, signum: signal.Signals, folder: Path) -> None:
    """Resume the run to its end and compare it with the unbroken one."""
    run_folder = folder / "runs" / "killed"
    if (run_folder / "summary.json").exists():
        # The page of a finished run may still have been interrupted.
        codes = {0, 128 + signum, -signum}
        assert killed.code in codes, f"finished, with exit code {killed.code}"
    else:
        codes = {-signum} if signum == signal.SIGKILL else {128 + signum, -signum}
        assert killed.code in codes, f"unfinished, with exit code {killed.code}: {killed.stderr}"
        # Python's own, in the first moments of a process, ends in that word.
        told = killed.stderr.strip().endswith("KeyboardInterrupt")
        assert told or "Traceback" not in killed.stderr, killed.stderr
        began = run_folder.exists()
        argv = ["--resume", str(run_folder)] if began else options(folder, **CHANGES)
        again = run(*argv)
        assert again.code == 0, again.stderr
        found = re.search(r"resuming .* (after step|from the start)", again.stdout)
        assert began == bool(found), again.stdout
    require_same(unbroken(), run_folder)
    litter = [path.name for path in folder.rglob("*.unfinished")]
    assert not litter, f"left {litter}"


@functools.cache
def unbroken() -> Path:
    folder = lasting_folder()
    done = run_here(*options(folder, **CHANGES))
    assert done.code == 0, done.stderr
    return folder / "runs" / "killed"


@functools.cache
def seconds_to_begin() -> float:
    folder, began = lasting_folder(), time.monotonic()
    process = start(*options(folder, **CHANGES))
    wait_for_folder(folder / "runs" / "killed", process)
    seconds = time.monotonic() - began
    process.kill()
    finish(process)
    return seconds


def wait_for_folder(folder: Path, process: subprocess.Popen[str]) -> None:
    while not folder.exists():
        assert process.poll() is None, finish(process).stderr
        time.sleep(0.005)


# -- what is around it


@pytest.mark.slow
def test_the_progress_bar_leaves_the_terminal_clean(tmp_path: Path) -> None:
    argv = options(tmp_path, **CHANGES)
    code, shown = on_terminal("experiments.train", *argv, interrupt_at=rb" [2-9]/40")

    assert code == 128 + signal.SIGINT
    hidden, visible = shown.rfind("\x1b[?25l"), shown.rfind("\x1b[?25h")
    assert hidden >= 0, "there was no progress bar"
    assert visible > hidden, "the cursor stayed hidden"
    assert shown.endswith("\n"), f"the last line has no end: {shown[-80:]!r}"
    assert "Traceback" not in shown, shown[-2000:]
