"""Checkpoints of a run: the run that one belongs to, and the newest good one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moe_ffn.config.errors import printable
from moe_ffn.data.prepare import PreparedData
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.runs.config import TrainConfig, differences
from moe_ffn.runs.outside_code import comparable_options
from moe_ffn.training.recovery.checkpoint_file import (
    BEST_NAME,
    IDENTITY,
    CheckpointError,
    read_checkpoint,
)

RUN_ID = "run_id"
"""Key of the run's id in the identity of a checkpoint and in `facts.json`."""

# -- whose checkpoint it is


def fixed_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options that cannot be changed when a run is resumed."""
    began_with = {} if config.init_from is None else {"init_from": config.init_from}
    return {
        **began_with,
        "seed": config.seed,
        "model": _without_free(comparable_options(config.model)),
        "data": {
            "tokenizer": comparable_options(config.data.tokenizer),
            "validation_percent": config.data.validation_percent,
            "seq_len": config.data.seq_len,
            "batch_size": config.data.batch_size,
        },
        "optimizer": {"type": comparable_options(config.optimizer)["type"]},
        "trainer": {"accumulate_grad_batches": config.trainer.accumulate_grad_batches},
    }


def _without_free(options: Mapping[str, Any]) -> dict[str, Any]:
    """Leave out the options of a model that change only its speed or its evaluation."""
    return {
        key: _without_free(value) if isinstance(value, Mapping) else value
        for key, value in options.items()
        if key not in ("backend", "eval_factor")
    }


def checkpoint_identity(
    config: TrainConfig, data: PreparedData, run_id: str | None = None
) -> dict[str, Any]:
    """Return what every checkpoint of a run holds: its fixed options, hashes of its data, and its id."""
    options = fixed_options(config)
    hashes = {"corpus": {"sha256": data.corpus_sha256}, "tokenizer": _hash(data.tokenizer)}
    whose = {} if run_id is None else {RUN_ID: run_id}
    return {**options, "data": {**options["data"], **hashes}, **whose}


def identity_of_weights(
    config: TrainConfig, tokenizer: Tokenizer, run_id: str | None = None
) -> dict[str, Any]:
    """Return the part of an identity that decides whether a model can take the weights."""
    return {
        "model": fixed_options(config)["model"],
        "data": {"tokenizer": _hash(tokenizer), "seq_len": config.data.seq_len},
        **({} if run_id is None else {RUN_ID: run_id}),
    }


def _hash(tokenizer: Tokenizer) -> dict[str, str]:
    return {"sha256": tokenizer_sha256(tokenizer.to_dict())}


def tokenizer_sha256(values: Mapping[str, Any]) -> str:
    """Return the hash that identifies a tokenizer.

    Args:
        values: its `to_dict`, as `tokenizer.json` holds it.
    """
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


# -- the newest good one


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
