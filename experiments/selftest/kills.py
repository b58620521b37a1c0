"""A run that is killed at any moment leaves something to go on from."""

from __future__ import annotations

import functools
import os
import pty
import random
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from experiments.selftest.case import Case, Chapter
from experiments.selftest.same_run import require_same
from experiments.selftest.scene import (
    REPOSITORY,
    Finished,
    environment,
    finish,
    lasting_folder,
    options,
    run,
    start,
    wait_for_row,
)

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGKILL)
TIMES_IN_TRAINING, TIMES_BEFORE = 20, 4
"""How often each comes at a random time while steps are made, and before the first of them."""

ROWS_EVERY = 2
CHANGES = {
    "logging__every_n_steps": str(ROWS_EVERY),
    "model__ffn": "{type: moe, num_experts: 4, router: {type: sigmoid_top_k, jitter: 0.1}}",
    "model__dropout": "0.1",
    "trainer__max_steps": "40",
    "trainer__validate_every_n_steps": "5",
    "checkpoints__every_n_steps": "3",
}


def cases() -> Iterator[Case]:
    for signum in SIGNALS:
        times = random.Random(int(signum))
        for when, kill, number in (
            ("in training", _killed_in_training, TIMES_IN_TRAINING),
            ("before it", _killed_early, TIMES_BEFORE),
        ):
            for time_of_it in range(1, number + 1):
                check = functools.partial(kill, signum, times.random())
                yield Case(f"{signum.name} {when}, random time {time_of_it} of {number}", check)
        for moment, nth, what in (
            ("update", 33, "in the middle of an optimizer step"),
            ("save", 4, "in the middle of a save"),
        ):
            check = functools.partial(_killed_inside, signum, moment, nth)
            short = (signum, moment) == (signal.SIGKILL, "save")
            yield Case(f"{signum.name} {what}", check, short)
    yield Case("the progress bar leaves the terminal clean", _leaves_terminal_clean)
    yield Case("without --resume nothing of a run is touched", _touches_nothing)


CHAPTER = Chapter(
    "kills",
    "A run that is killed by SIGINT, SIGTERM or SIGKILL, at any moment, and resumed ends equal to the "
    "unbroken one; its exit code says that it was not finished.",
    cases,
)


def _killed_early(signum: signal.Signals, part: float, folder: Path) -> str:
    """Killed when `part` of the time has gone by that it takes to begin."""
    seconds = part * _unbroken().seconds_to_begin
    process = start(*_argv(folder))
    time.sleep(seconds)
    process.send_signal(signum)
    return _resumes(finish(process), signum, folder)


def _killed_in_training(signum: signal.Signals, part: float, folder: Path) -> str:
    """Killed when `part` of the steps have been made and a moment more, so that it is anywhere in one."""
    process = start(*_argv(folder))
    row, moment = divmod(part * int(CHANGES["trainer__max_steps"]), ROWS_EVERY)
    if row:
        wait_for_row(folder / "runs" / "killed", int(row) * ROWS_EVERY, process)
    else:
        _wait_for_folder(folder / "runs" / "killed", process)
    time.sleep(moment / ROWS_EVERY * 0.1)
    process.send_signal(signum)
    return _resumes(finish(process), signum, folder)


def _wait_for_folder(folder: Path, process: subprocess.Popen[str]) -> None:
    while not folder.exists():
        assert process.poll() is None, finish(process).stderr
        time.sleep(0.005)


def _killed_inside(signum: signal.Signals, moment: str, nth: int, folder: Path) -> str:
    process = start(
        *(moment, signum.name, str(nth), *_argv(folder)),
        program="experiments.selftest.killed_inside",
    )
    return _resumes(finish(process), signum, folder)


def _resumes(killed: Finished, signum: signal.Signals, folder: Path) -> str:
    """Go on with the run until it ends, and hold it to the unbroken one; returns from where."""
    run_folder = folder / "runs" / "killed"
    if (run_folder / "summary.json").exists():
        # The page of a finished run may still have been interrupted.
        codes = {0, 128 + signum, -signum}
        assert killed.code in codes, f"finished, with exit code {killed.code}"
        where = "it was finished"
    else:
        codes = {-signum} if signum == signal.SIGKILL else {128 + signum, -signum}
        assert killed.code in codes, f"unfinished, with exit code {killed.code}: {killed.stderr}"
        # Python's own, in the first moments of a process, ends in that word.
        told = killed.stderr.strip().endswith("KeyboardInterrupt")
        assert told or "Traceback" not in killed.stderr, killed.stderr
        began = run_folder.exists()
        again = run("--resume", str(run_folder)) if began else run(*_argv(folder))
        assert again.code == 0, again.stderr
        found = re.search(r"resuming .* (after step \d+|from the start)", again.stdout)
        where = found[1] if found else "it had not begun"
        assert began == bool(found), again.stdout
    require_same(_unbroken().folder, run_folder)
    litter = [path.name for path in folder.rglob("*.unfinished")]
    assert not litter, f"left {litter}"
    return where


def _leaves_terminal_clean(folder: Path) -> None:
    """In a terminal, Ctrl-C leaves the cursor visible and the last line ended."""
    shown, code = _in_a_terminal(_argv(folder))
    assert code == 128 + signal.SIGINT, f"exit code {code}"
    hidden, visible = shown.rfind(b"\x1b[?25l"), shown.rfind(b"\x1b[?25h")
    assert hidden >= 0, "there was no progress bar"
    assert visible > hidden, "the cursor stayed hidden"
    assert shown.endswith(b"\n"), f"the last line has no end: {shown[-80:]!r}"
    assert b"Traceback" not in shown, shown[-2000:]


def _in_a_terminal(argv: list[str]) -> tuple[bytes, int]:
    """What a person sees of a run that gets Ctrl-C once its progress bar moves, and its exit code."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "experiments.train", *argv],
        cwd=REPOSITORY,
        env=environment(TERM="xterm", COLUMNS="100"),
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    shown, interrupted = b"", False
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        ready, _, _ = select.select([ours], [], [], 0.1)
        if ready:
            try:
                shown += os.read(ours, 65536)
            except OSError:  # the program has closed its end
                break
        elif process.poll() is not None:
            break
        if not interrupted and re.search(rb" [2-9]/40", shown):
            process.send_signal(signal.SIGINT)
            interrupted = True
    os.close(ours)
    process.kill()
    return shown, process.wait()


def _touches_nothing(folder: Path) -> None:
    assert run(*_argv(folder, trainer__max_steps="6")).code == 0
    before = {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()}
    again = run(*_argv(folder))
    assert again.code == 2, f"exit code {again.code}"
    assert "never overwritten" in again.stderr, again.stderr
    after = {path: path.read_bytes() for path in (folder / "runs").rglob("*") if path.is_file()}
    assert before == after, "the run was changed"


def _argv(folder: Path, **changes: str) -> list[str]:
    return options(folder, **({"run__name": "killed"} | CHANGES | changes))


class _Unbroken:
    """The run that nothing happened to, and how long it took to begin."""

    def __init__(self) -> None:
        parent = lasting_folder()
        self.folder = parent / "runs" / "killed"
        began = time.monotonic()
        process = start(*_argv(parent))
        _wait_for_folder(self.folder, process)
        self.seconds_to_begin = time.monotonic() - began
        ended = finish(process)
        assert ended.code == 0, ended.stderr


@functools.cache
def _unbroken() -> _Unbroken:
    return _Unbroken()
