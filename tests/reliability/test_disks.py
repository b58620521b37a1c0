"""Training continues on a full, read-only or failing disk. It warns once and retries, and no unreadable
file ever has a final name.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from moe_ffn.runs.folder import CHECKPOINTS_FOLDER
from tests.helpers.same_run import require_same
from tests.helpers.tiny_runs import (
    Finished,
    finish,
    lasting_folder,
    options,
    run_here,
    start_command,
    start_script,
)

pytestmark = pytest.mark.slow  # tests/training has what a disk does to each file, by itself

SAVE_OFTEN = {"checkpoints__every_n_steps": "2", "run__name": "run"}
FULL, READ_ONLY = "No space left on device", "Read-only file system"


ALONE = ("unshare", "-rm", "sh", "-c")
"""Command that runs a script in a private mount namespace."""


def mounting(folder: object, size: str) -> str:
    """The command that mounts an empty disk of this size at `folder`.

    Where this machine does not permit it, the test is skipped with the reason.
    """
    command = f"mount -t tmpfs -o size={size} none '{folder}'"
    try:
        subprocess.run([*ALONE, command], check=True, capture_output=True, text=True)
    except (OSError, subprocess.CalledProcessError) as error:
        why = getattr(error, "stderr", None) or str(error)
        pytest.skip(f"this machine gives no disk of one's own ({why.splitlines()[0]})")
    return command


@cache
def undisturbed() -> Path:
    folder = lasting_folder()
    done = run_here(*options(folder, **SAVE_OFTEN))
    assert done.code == 0, done.stderr
    return folder / "runs" / "run"


def disturb(folder: Path, disturbance: str, size: str | None = None) -> tuple[Finished, Path]:
    """Train with a disturbance, while a reader checks that it never sees a partial file.

    Args:
        size: of a private disk for the runs; None keeps them on the disk of `folder`.

    Returns:
        the exit of the program, and the folder of the run.
    """
    runs, copied, seen = folder / "runs", folder / "copied", folder / "seen.json"
    runs.mkdir()
    words = [str(seen), disturbance, str(runs / "run"), *options(folder, **SAVE_OFTEN)]
    if size is None:
        done, left = finish(start_script("disturbed.py", *words)), runs / "run"
    else:
        python = [
            sys.executable,
            str(Path(__file__).parents[1] / "helpers" / "disturbed.py"),
            *words,
        ]
        script = f"{mounting(runs, size)} && \"$@\"; code=$?; cp -a '{runs}' '{copied}'; exit $code"
        done, left = finish(start_command([*ALONE, script, "sh", *python])), copied / "run"
    assert "Traceback" not in done.stderr, done.stderr
    found = json.loads(seen.read_text(encoding="utf-8"))
    assert found["looks"] > 0
    assert (found["unreadable"], found["litter"]) == ([], [])
    for what in ("cannot be written", "can be written again"):
        said = re.findall(rf"^disk: '(.+)' {what}", done.stderr, re.MULTILINE)
        assert len(said) == len(set(said)), f"said more than once: {done.stderr}"
    return done, left


@pytest.mark.parametrize(
    ("disturbance", "size", "why"),
    [
        ("full", "16m", FULL),
        ("read-only", "16m", READ_ONLY),
        ("failing", None, "Input/output error"),
    ],
)
def test_a_run_is_complete_once_its_disk_works_again(
    tmp_path: Path, disturbance: str, size: str | None, why: str
) -> None:
    done, left = disturb(tmp_path, disturbance, size)

    assert done.code == 0, done.stderr
    assert f"{CHECKPOINTS_FOLDER}' cannot be written ({why})" in done.stderr
    assert f"{CHECKPOINTS_FOLDER}' can be written again" in done.stderr
    require_same(undisturbed(), left)


@pytest.mark.parametrize(
    ("disturbance", "why"), [("full to the end", FULL), ("read-only to the end", READ_ONLY)]
)
def test_a_run_left_on_a_bad_disk_can_be_resumed(
    tmp_path: Path, disturbance: str, why: str
) -> None:
    done, left = disturb(tmp_path, disturbance, "16m")

    assert done.code == 1, f"exit code {done.code}: {done.stderr}"
    assert "step 12/12" in done.stderr, "training did not go on"
    (error,) = (line for line in done.stderr.splitlines() if line.startswith("error: "))
    assert f"the weights of step 12 are not saved ({why})" in error
    resumed = run_here("--resume", str(left))
    assert resumed.code == 0, resumed.stderr
    require_same(undisturbed(), left)


def test_two_ranks_of_which_the_one_that_writes_cannot(tmp_path: Path) -> None:
    script = 'ulimit -f 200; exec "$@"'  # blocks of 512 or 1024 bytes; a checkpoint has 340 KB
    ranks = ("--trainer.devices", "2", "--trainer.strategy", "ddp")
    train = [sys.executable, "-m", "experiments.train", *options(tmp_path, **SAVE_OFTEN), *ranks]

    done = finish(start_command(["sh", "-c", script, "sh", *train]))

    assert done.code == 1, f"exit code {done.code}: {done.stderr}"
    assert "step 12/12" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    told = [line for line in done.stderr.splitlines() if "cannot be written" in line]
    assert len([line for line in told if CHECKPOINTS_FOLDER in line]) == 1, done.stderr
    assert not list((tmp_path / "runs/run" / CHECKPOINTS_FOLDER).iterdir()), "something was left"
