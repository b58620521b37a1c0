"""Which checkpoint of a run is the newest good one, and why the others are not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.resuming.identity import differences
from moe_ffn.training.checkpoint_file import IDENTITY, CheckpointError, read_checkpoint
from moe_ffn.training.checkpoint_folder import BEST_NAME

_NEEDED = {
    "state_dict": Mapping,
    "optimizer_states": list,
    "lr_schedulers": list,
    "loops": Mapping,
    "callbacks": Mapping,
    "epoch": int,
    "global_step": int,
}
"""What Lightning reads of a checkpoint, and as what."""

_OF_WEIGHTS = re.compile(r"model|data$|data\.tokenizer|data\.seq_len")
"""The part of an identity without which weights mean something else."""


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
        passed_over.append(f"{path.name} {reason}")
    return None, passed_over


def best_checkpoint(folder: Path) -> list[Path]:
    """That of the best weights, where there is one; a link to nothing is one too, and not good."""
    best = folder / BEST_NAME
    return [best] if os.path.lexists(best) else []


def refusal_to_resume(
    values: Mapping[str, Any], expected: Mapping[str, Any], state: Mapping[str, Tensor]
) -> str | None:
    """Why a run cannot go on from a checkpoint; None where it can.

    Args:
        expected: the `identity` of the run; what else a checkpoint says of its run is not looked at.
        state: of its model, whose names and shapes the checkpoint has to have.
    """
    for name, kind in (_NEEDED | {IDENTITY: Mapping}).items():
        if not isinstance(values.get(name), kind):
            return f"lacks '{name}', so it is no checkpoint of a run"
    found = {key: values[IDENTITY].get(key) for key in expected}
    return _first(differences(found, expected)) or _refusal_of_state(values["state_dict"], state)


def refusal_to_load(
    values: Mapping[str, Any], expected: Mapping[str, Any], state: Mapping[str, Tensor]
) -> str | None:
    """Why the weights of a checkpoint do not go into a model; None where they do.

    Args:
        expected: the `identity_of_weights` of the run.
        state: of its model, by the names that weights have in `values["state_dict"]`.
    """
    for name in ("state_dict", IDENTITY):
        if not isinstance(values.get(name), Mapping):
            return f"lacks '{name}', so it is no checkpoint of a run"
    different = differences(values[IDENTITY], expected)
    of_weights = {key: pair for key, pair in different.items() if _OF_WEIGHTS.match(key)}
    return _first(of_weights) or _refusal_of_state(values["state_dict"], state)


def _first(different: Mapping[str, tuple[Any, Any]]) -> str | None:
    for key, (old, new) in different.items():
        return f"was made with {key} {_short(old)}, but this run has {_short(new)}"
    return None


def _refusal_of_state(found: Mapping[str, Any], state: Mapping[str, Tensor]) -> str | None:
    for name, value in state.items():
        if name not in found:
            return f"lacks the weight '{name}'"
        if not isinstance(found[name], Tensor) or found[name].shape != value.shape:
            return f"has '{name}' in another shape than {tuple(value.shape)}"
        if found[name].is_floating_point() != value.is_floating_point():
            return f"has '{name}' as {found[name].dtype}, not {value.dtype}"
        if found[name].isnan().any():
            return f"holds NaN in '{name}'"
    if unknown := [name for name in found if name not in state]:
        return f"has the weight '{unknown[0]}', which this model lacks"
    return None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:12]}..."
