"""Which checkpoint of a run is the newest good one, and why the others are not."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.config import TrainConfig
from experiments.resume import differences
from moe_ffn.data.prepare import PreparedData
from moe_ffn.training.checkpoint_file import IDENTITY, CheckpointError, read_checkpoint
from moe_ffn.training.checkpoint_folder import BEST_NAME, step_checkpoints

_NEEDED = ("state_dict", "optimizer_states", "lr_schedulers", "loops", "callbacks", "global_step")

_FREE = {"backend", "eval_factor"}
"""Options of the model that change how it is computed, or evaluated, and not what it is."""


@dataclass(frozen=True)
class GoodCheckpoint:
    """One that was read and fits."""

    path: Path
    values: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.values["global_step"]


def identity(config: TrainConfig, data: PreparedData) -> dict[str, Any]:
    """What two runs have to agree in for one to go on from a checkpoint of the other."""
    tokenizer = json.dumps(data.tokenizer.to_dict(), sort_keys=True)
    return {
        "seed": config.seed,
        "model": _without_free(config.model.to_dict()),
        "data": {
            "corpus": {"sha256": data.corpus_sha256},
            "tokenizer": {"sha256": hashlib.sha256(tokenizer.encode()).hexdigest()},
            "validation_percent": config.data.validation_percent,
            "seq_len": config.data.seq_len,
            "batch_size": config.data.batch_size,
        },
        "trainer": {"accumulate_grad_batches": config.trainer.accumulate_grad_batches},
    }


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


def candidates(folder: Path) -> list[Path]:
    """Of the folder of checkpoints, the newest first; the best weights last, since they may be old."""
    best = folder / BEST_NAME
    return [*step_checkpoints(folder), *([best] if best.exists() else [])]


def refusal_to_resume(
    values: Mapping[str, Any], expected: Mapping[str, Any], state: Mapping[str, Tensor]
) -> str | None:
    """Why a run cannot go on from a checkpoint; None where it can.

    Args:
        expected: the `identity` of the run.
        state: of its model, whose names and shapes the checkpoint has to have.
    """
    if missing := [name for name in (*_NEEDED, IDENTITY) if name not in values]:
        return f"lacks '{missing[0]}', so it is no checkpoint of a run"
    if different := differences(values[IDENTITY], expected):
        key, (old, new) = next(iter(different.items()))
        return f"was made with {key} {_short(old)}, but this run has {_short(new)}"
    return refusal_of_weights(values["state_dict"], state)


def refusal_of_weights(found: Mapping[str, Any], state: Mapping[str, Tensor]) -> str | None:
    """Why weights do not go into a model; None where they do."""
    for name, value in state.items():
        if name not in found:
            return f"lacks the weight '{name}'"
        if not isinstance(found[name], Tensor) or found[name].shape != value.shape:
            return f"has '{name}' in another shape than {tuple(value.shape)}"
    if unknown := [name for name in found if name not in state]:
        return f"has the weight '{unknown[0]}', which this model lacks"
    return None


def _without_free(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_free(value) if isinstance(value, Mapping) else value
        for key, value in options.items()
        if key not in _FREE
    }


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 20 else f"{text[:12]}..."
