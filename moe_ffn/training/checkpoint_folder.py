"""The names in a folder of checkpoints; imports neither torch nor lightning."""

from __future__ import annotations

import re
from pathlib import Path

from moe_ffn.files import kind_of, require_folder

BEST_NAME = "best.ckpt"
"""The weights of the lowest validation loss, without what a run needs to go on."""

_STEP_NAME = re.compile(r"step_([0-9]{8,})\.ckpt")


def step_name(step: int) -> str:
    return f"step_{step:08d}.ckpt"


def step_of(path: Path) -> int:
    """The optimizer step that a checkpoint's name says."""
    match = _STEP_NAME.fullmatch(path.name)
    assert match is not None
    return int(match[1])


def step_checkpoints(folder: Path) -> list[Path]:
    """Those of steps, the newest first, good or not; none where there is no folder.

    Raises:
        OSError: it cannot be read, or is a link.
    """
    if kind_of(folder) is None:
        return []
    require_folder(folder)
    found = [path for path in folder.iterdir() if _STEP_NAME.fullmatch(path.name)]
    return sorted(found, key=step_of, reverse=True)
