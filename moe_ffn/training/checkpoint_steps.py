"""Which step a checkpoint is of: the one inside it, whatever its name says."""

from __future__ import annotations

import os
from pathlib import Path

from moe_ffn.config import MOST
from moe_ffn.training.checkpoint_file import CheckpointError, peek, verify
from moe_ffn.training.checkpoint_folder import step_checkpoints, step_name, step_of

_LONGEST_NAME = 200
"""Characters of a name that is made longer; file systems take 255."""


def step_inside(path: Path) -> int | None:
    """The optimizer step of a checkpoint, read without its weights; None where it has none.

    Whether the rest of the file is good is not looked at.
    """
    try:
        step = peek(path).get("global_step")
    except (CheckpointError, MemoryError):  # a damaged file may ask for any amount
        return None
    return step if type(step) is int and 0 <= step <= MOST else None


def likely_step(path: Path) -> int:
    """The step inside, or of a file that cannot be read the one in its name."""
    step = step_inside(path)
    return step_of(path) if step is None else step


def is_misnamed(path: Path, step: int) -> bool:
    """Whether the name of a checkpoint of `step` says another."""
    return path.name != step_name(step)


def newest_first(folder: Path) -> list[Path]:
    """The checkpoints of steps, good or not; of two of one step the one that is named so is first."""
    steps = {path: likely_step(path) for path in step_checkpoints(folder)}
    return sorted(
        steps,
        key=lambda path: (steps[path], not is_misnamed(path, steps[path]), path.name),
        reverse=True,
    )


def pass_over(path: Path, name: str | None = None) -> Path:
    """Give a checkpoint a name under which nobody takes it for one; nothing is written over.

    Args:
        name: that it is known by; its own by default.
    """
    stem = f"{(name or path.name)[:_LONGEST_NAME]}.passed-over"
    aside, number = path.with_name(stem), 1
    while os.path.lexists(aside):
        number += 1
        aside = path.with_name(f"{stem}-{number}")
    return path.rename(aside)


def put_names_right(folder: Path) -> list[tuple[str, str]]:
    """Name every good checkpoint by the step inside it.

    At any moment each has the name of some step, so that who dies in between leaves nothing in doubt. Of two
    of one step the second of `newest_first` is passed over.

    Returns:
        the names of those that were misnamed, before and now.

    Raises:
        OSError: a file cannot be renamed.
    """
    waiting: list[tuple[str, Path, int]] = []
    for path in newest_first(folder):
        step = _good_step(path)
        if step is not None and is_misnamed(path, step):
            waiting.append((path.name, path.rename(_free_place(folder)), step))
    renamed: list[tuple[str, str]] = []
    for name, path, step in waiting:
        place = folder / step_name(step)
        if os.path.lexists(place) and _good_step(place) != step:
            pass_over(place)  # damaged, or it would be waiting too
        now = pass_over(path, name) if os.path.lexists(place) else path.rename(place)
        renamed.append((name, now.name))
    return renamed


def _good_step(path: Path) -> int | None:
    """The step inside a checkpoint that matches its checksum."""
    step = step_inside(path)
    try:
        if step is not None:
            verify(path)
    except (CheckpointError, OSError):
        return None
    return step


def _free_place(folder: Path) -> Path:
    """Named by a step that no run comes to, and no checkpoint has."""
    step = MOST + 1
    while os.path.lexists(folder / step_name(step)):
        step += 1
    return folder / step_name(step)
