"""Checkpoints of a run: the newest good one, and why others are skipped."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moe_ffn.config.errors import printable
from moe_ffn.runs.config import differences
from moe_ffn.training.recovery.checkpoint_file import (
    BEST_NAME,
    IDENTITY,
    CheckpointError,
    read_checkpoint,
)


@dataclass(frozen=True)
class GoodCheckpoint:
    """A checkpoint that was read and fits the run."""

    path: Path
    values: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.values["global_step"]


def newest_good(
    candidates: Iterable[Path], refusal: Callable[[Mapping[str, Any]], str | None]
) -> tuple[GoodCheckpoint | None, list[str]]:
    """Return the first checkpoint that can be read and that `refusal` accepts.

    Returns:
        that checkpoint, or None; and what is wrong with those before it, such as
        `step_00000012.ckpt is empty`.
    """
    skipped: list[str] = []
    for path in candidates:
        try:
            values = read_checkpoint(path)
            reason = refusal(values)
            if reason is None:
                return GoodCheckpoint(path, values), skipped
        except CheckpointError as error:
            reason = str(error)
        skipped.append(printable(f"{path.name} {reason}"))
    return None, skipped


def best_checkpoint(folder: Path) -> list[Path]:
    """Return the checkpoint of the best weights in a list, empty without one; a dangling link counts."""
    best = folder / BEST_NAME
    return [best] if os.path.lexists(best) else []


def refusal_of_weights(
    values: Mapping[str, Any], expected: Mapping[str, Any], model: nn.Module
) -> str | None:
    """Return why the weights of a checkpoint do not go into a model; None if they do.

    Args:
        expected: a `checkpoint_identity` or an `identity_of_weights`; other keys are not compared.
        model: a module with the names that weights have in `values["state_dict"]`.
    """
    weights, identity = values.get("state_dict"), values.get(IDENTITY)
    if not isinstance(weights, Mapping) or not isinstance(identity, Mapping):
        return "is no checkpoint of a run"
    found = {key: identity.get(key) for key in expected}
    if isinstance(found["data"], Mapping):
        found["data"] = {key: found["data"].get(key) for key in expected["data"]}
    for key, (before, now) in differences(found, expected).items():
        return f"was made with {_short(key)} {_short(before)}, but this run has {_short(now)}"
    shapes = getattr(weights, "described", weights)  # tensors in shards are not read for this
    for name, value in model.state_dict().items():
        if name not in shapes:
            return f"lacks the weight '{name}'"
        if isinstance(value, Tensor) and shapes[name].shape != value.shape:
            return (
                f"has '{name}' in the shape {tuple(shapes[name].shape)}, not {tuple(value.shape)}"
            )
    return None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:12]}..."
