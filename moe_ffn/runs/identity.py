"""Identity of a run: the values that all its checkpoints share, and options that a resume cannot change."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_ffn.config.errors import ConfigError, command
from moe_ffn.config.option_tree import differences
from moe_ffn.data.prepare import PreparedData
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.runs.config import Resume, TrainConfig
from moe_ffn.runs.custom_code import comparable_options
from moe_ffn.runs.folder import FACTS_FILE, REPORT_FILE, SUMMARY_FILE, is_finished
from moe_ffn.runs.json_files import Facts, Summary

RUN_ID = "run_id"
"""Key of the run's id in checkpoints and in `facts.json`."""


def fixed_options(config: TrainConfig) -> dict[str, Any]:
    """Return the options that a resumed run cannot change."""
    initial = {} if config.init_from is None else {"init_from": config.init_from}
    # An optimizer's state is stored in the order of its groups, which the named parts determine.
    groups = sorted(getattr(config.optimizer, "groups", {}))
    return {
        **initial,
        "seed": config.seed,
        "model": _without_changeable(comparable_options(config.model)),
        "data": {
            "tokenizer": comparable_options(config.data.tokenizer),
            "validation_percent": config.data.validation_percent,
            "seq_len": config.data.seq_len,
            "batch_size": config.data.batch_size,
        },
        "optimizer": {
            "type": comparable_options(config.optimizer)["type"],
            **({"groups": groups} if groups else {}),
        },
        "trainer": {"accumulate_grad_batches": config.trainer.accumulate_grad_batches},
    }


def resume_with(config: TrainConfig, own: TrainConfig, folder: Path, *, is_named: bool) -> Resume:
    """Return a run to resume, with new options, from the `own` options in its folder.

    The user gave the folder if `is_named`; otherwise `config.run` determined it. Raises ConfigError if an
    option cannot be changed, or the run is finished.
    """
    fixed = differences(fixed_options(own), fixed_options(config))
    for key, (before, now) in fixed.items():
        raise ConfigError(
            f"{key}: is {before} in '{folder}' and cannot become {now}; leave it out, or start a new run"
        )
    if is_named and config.run != own.run:
        raise ConfigError(
            f"run: '{folder}' keeps its name and place; leave --run.name and --run.output_dir out"
        )
    config = config.model_copy(update={"run": own.run})
    changes = differences(comparable_options(own), comparable_options(config))
    limits = tuple(_limits_of_early_end(own, folder))
    is_longer = config.trainer.max_steps > own.trainer.max_steps
    if is_finished(folder) and not is_longer and not any(k.startswith(limits) for k in changes):
        page = f", but its page was not written: {command('report', folder)}"
        fix = f"raise trainer.max_steps (now {own.trainer.max_steps})"
        if limits:
            fix = f"change {' or '.join(limits)}, which ended it early,"
        raise ConfigError(
            f"'{folder}' is finished{'' if (folder / REPORT_FILE).is_file() else page}; {fix} to train on, "
            "or leave --resume out to start a new run"
        )
    return Resume(folder, config, changes, own, Facts.read(folder / FACTS_FILE))


def _limits_of_early_end(own: TrainConfig, folder: Path) -> list[str]:
    """Return the options that may have ended a run before its last step; empty if it reached that step."""
    num_tokens = Summary.read(folder / SUMMARY_FILE).num_tokens
    max_tokens = own.trainer.max_steps * own.tokens_per_step
    return [] if num_tokens is None or num_tokens >= max_tokens else own.trainer.early_limits


def _without_changeable(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return a model's options without the options that affect only its speed or its evaluation."""
    return {
        key: _without_changeable(value) if isinstance(value, Mapping) else value
        for key, value in options.items()
        if key not in ("backend", "eval_factor")
    }


def checkpoint_identity(
    config: TrainConfig, data: PreparedData, run_id: str | None = None
) -> dict[str, Any]:
    """Return the values that every checkpoint of a run holds: fixed options, hashes of the data, run id."""
    options = fixed_options(config)
    hashes = {"corpus": {"sha256": data.corpus_sha256}, "tokenizer": _hash(data.tokenizer)}
    run_ids = {} if run_id is None else {RUN_ID: run_id}
    return {**options, "data": {**options["data"], **hashes}, **run_ids}


def identity_of_weights(
    config: TrainConfig, tokenizer: Tokenizer, run_id: str | None = None
) -> dict[str, Any]:
    """Return the part of an identity that has to match for a model to load the weights."""
    return {
        "model": fixed_options(config)["model"],
        "data": {"tokenizer": _hash(tokenizer), "seq_len": config.data.seq_len},
        **({} if run_id is None else {RUN_ID: run_id}),
    }


def _hash(tokenizer: Tokenizer) -> dict[str, str]:
    return {"sha256": tokenizer_sha256(tokenizer.to_dict())}


def tokenizer_sha256(values: Mapping[str, Any]) -> str:
    """Return the hash that identifies a tokenizer by the content of its `tokenizer.json`."""
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()
