"""What makes a run the run it is: options and data that stay the same however often it is resumed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from experiments.config import TrainConfig
from experiments.outside.tags import comparable_options

if TYPE_CHECKING:
    from moe_ffn.data.prepare import PreparedData
    from moe_ffn.data.tokenizer import Tokenizer

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


def identity(config: TrainConfig, data: PreparedData) -> dict[str, Any]:
    """What two runs have to agree in for one to go on from a checkpoint of the other."""
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
