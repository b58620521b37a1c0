"""What makes a run the run it is: its id, its options and its data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.config import TrainConfig
from experiments.outside.tags import comparable_options
from moe_ffn.training.config import TrainerConfig

if TYPE_CHECKING:
    from moe_ffn.data.prepare import PreparedData
    from moe_ffn.data.tokenizer import Tokenizer

RUN_ID, PRECISION, CHANGEABLE = "run_id", "precision", "changeable"
"""Keys of the identity in a checkpoint, beside those of what cannot be changed."""

_FREE = {"backend", "eval_factor"}
"""Options of the model that change how it is computed, or evaluated, and not what it is."""


def fixed_options(config: TrainConfig) -> dict[str, Any]:
    """The options that cannot be changed when a run is resumed; imports no torch."""
    return {
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


def changeable_options(config: TrainConfig) -> dict[str, Any]:
    """The others that change what a run computes; imports no torch.

    Left out is where and on what it runs, how fast, and what is written of it.
    """
    options = comparable_options(config)
    trainer = {"gradient_clip_algorithm": None} | options["trainer"]
    of_training = {*TrainerConfig.model_fields, "gradient_clip_algorithm"} - {"compile"}
    return {
        "data": {"validation_tokens": config.data.validation_tokens},
        "objective": options["objective"],
        "optimizer": options["optimizer"],
        "trainer": {k: v for k, v in trainer.items() if k in of_training},
    }


def checkpoint_identity(
    config: TrainConfig, data: PreparedData, run_id: str = "", precision: str = ""
) -> dict[str, Any]:
    """What every checkpoint says of its run.

    Args:
        precision: in which it computes, where its options say `auto`.
    """
    return {
        RUN_ID: run_id,
        PRECISION: precision,
        **identity(config, data),
        CHANGEABLE: changeable_options(config),
    }


def identity(config: TrainConfig, data: PreparedData) -> dict[str, Any]:
    """What stays the same however often a run is resumed: the fixed options, and the data."""
    options = fixed_options(config)
    of_data = {
        **options["data"],
        "corpus": {"sha256": data.corpus_sha256},
        "tokenizer": _tokenizer_identity(data.tokenizer),
    }
    return {**options, "data": of_data}


def identity_of_weights(config: TrainConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The part of an identity in which a model has to agree with the weights that are put into it."""
    return {
        "model": _without_free(comparable_options(config.model)),
        "data": {"tokenizer": _tokenizer_identity(tokenizer), "seq_len": config.data.seq_len},
    }


def differences(
    before: Mapping[str, Any], now: Mapping[str, Any], prefix: str = ""
) -> dict[str, tuple[Any, Any]]:
    """Dotted key -> (value before, value now), of everything in which two nested mappings differ."""
    found: dict[str, tuple[Any, Any]] = {}
    for key in [*before, *(key for key in now if key not in before)]:
        old, new = before.get(key), now.get(key)
        if isinstance(old, Mapping) and isinstance(new, Mapping):
            found |= differences(old, new, f"{prefix}{key}.")
        elif old != new:
            found[f"{prefix}{key}"] = (old, new)
    return found


def _tokenizer_identity(tokenizer: Tokenizer) -> dict[str, str]:
    values = json.dumps(tokenizer.to_dict(), sort_keys=True)
    return {"sha256": hashlib.sha256(values.encode()).hexdigest()}


def _without_free(options: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: _without_free(value) if isinstance(value, Mapping) else value
        for key, value in options.items()
        if key not in _FREE
    }
