"""A finished run, made once, of which every case damages a copy."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path

from experiments.selftest.scene import lasting_folder, options, run
from moe_ffn.runs.folder import CHECKPOINTS_FOLDER, SUMMARY_FILE

OLDER, NEWEST, BEST = "step_00000008.ckpt", "step_00000012.ckpt", "best.ckpt"


@cache
def finished_run() -> Path:
    """A tiny run with checkpoints of steps 8 and 12, and alarms; nobody writes to it."""
    folder = lasting_folder()
    done = run(*options(folder, run__name="run", logging__alarms__router_logit="0.01"))
    assert done.code == 0, done.stderr
    found = folder / "runs" / "run"
    names = sorted(path.name for path in (found / CHECKPOINTS_FOLDER).iterdir())
    assert names == [BEST, OLDER, NEWEST], names
    return found


def finished_copy(folder: Path) -> Path:
    """The run, in a folder of the case's own."""
    return Path(shutil.copytree(finished_run(), folder / "run"))


def unfinished_copy(folder: Path) -> Path:
    """The same, as if its process had died just before its end."""
    copied = finished_copy(folder)
    (copied / SUMMARY_FILE).unlink()
    return copied
