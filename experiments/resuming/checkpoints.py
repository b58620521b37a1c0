"""Which checkpoint of a run is the newest good one, and why the others are not."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ffn.errors import printable
from moe_ffn.training.checkpoint_file import CheckpointError, read_checkpoint
from moe_ffn.training.checkpoint_folder import BEST_NAME


@dataclass(frozen=True)
class GoodCheckpoint:
    """One that was read and fits."""

    path: Path
    values: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.values["global_step"]


def newest_good(
    candidates: Iterable[Path], refusal: Callable[[Mapping[str, Any]], str | None]
) -> tuple[GoodCheckpoint | None, list[str]]:
    """The first that can be read and that `refusal` says nothing against.

    Returns:
        that one, or None; and of those before it the names and what is wrong, such as
        `step_00000012.ckpt is empty`.
    """
    passed_over: list[str] = []
    for path in candidates:
        try:
            values = read_checkpoint(path)
            reason = refusal(values)
            if reason is None:
                return GoodCheckpoint(path, values), passed_over
        except CheckpointError as error:
            reason = str(error)
        passed_over.append(printable(f"{path.name} {reason}"))
    return None, passed_over


def best_checkpoint(folder: Path) -> list[Path]:
    """That of the best weights, where there is one; a link to nothing is one too, and not good."""
    best = folder / BEST_NAME
    return [best] if os.path.lexists(best) else []
