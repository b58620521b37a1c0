"""Which run a checkpoint belongs to: what both it and the run's folder say of that.

A checkpoint belongs to a run that has its id and has had its options. `saved.json` knows the id and the step
that was saved last. It stands outside the folder of the checkpoints, so that it tells when those are lost.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.option_tree import flatten
from moe_ffn.data.prepare import PreparedData
from moe_ffn.data.split import Documents, changed
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.files import read_object
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import (
    CONFIG_FILE,
    DOCUMENTS_FILE,
    FACTS_FILE,
    RESUMES_FILE,
    SAVED_FILE,
)
from moe_ffn.runs.json_files import Facts, Resumption, Saved
from moe_ffn.runs.outside_code import comparable_options
from moe_ffn.training.config import TrainerConfig
from moe_ffn.training.monitoring.json_lines import read_lines

RUN_ID, PRECISION, CHANGEABLE = "run_id", "precision", "changeable"
"""Keys of the identity in a checkpoint, beside the options that cannot be changed."""


def new_run_id() -> str:
    return secrets.token_hex(8)


def fixed_options(config: TrainConfig) -> dict[str, Any]:
    """The options that cannot be changed when a run is resumed."""
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
    """The options of a model without those that only change how it is computed or evaluated."""
    return {
        key: _without_free(value) if isinstance(value, Mapping) else value
        for key, value in options.items()
        if key not in ("backend", "eval_factor")
    }


def changeable_options(config: TrainConfig) -> dict[str, Any]:
    """The options that may be changed on resuming and change the result.

    Left out are those of speed, devices, places and logs.
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


def identity(config: TrainConfig, data: PreparedData) -> dict[str, Any]:
    """What stays the same however often a run is resumed: the fixed options, and the data."""
    options = fixed_options(config)
    hashes = {"corpus": {"sha256": data.corpus_sha256}, "tokenizer": _hash(data.tokenizer)}
    return {**options, "data": {**options["data"], **hashes}}


def identity_of_weights(config: TrainConfig, tokenizer: Tokenizer) -> dict[str, Any]:
    """The part of an identity in which a model has to agree with the weights that are put into it."""
    return {
        "model": fixed_options(config)["model"],
        "data": {"tokenizer": _hash(tokenizer), "seq_len": config.data.seq_len},
    }


def _hash(tokenizer: Tokenizer) -> dict[str, str]:
    return {"sha256": tokenizer_sha256(tokenizer.to_dict())}


def tokenizer_sha256(values: Mapping[str, Any]) -> str:
    """By which tokenizers are told apart.

    Args:
        values: its `to_dict`, as `tokenizer.json` holds it.
    """
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()


def checkpoint_identity(
    config: TrainConfig, data: PreparedData, run_id: str = "", precision: str = ""
) -> dict[str, Any]:
    """What every checkpoint says of its run.

    Args:
        precision: what `trainer.precision: auto` or `fastest` was resolved to.
    """
    whose = {RUN_ID: run_id, PRECISION: precision, CHANGEABLE: changeable_options(config)}
    return {**identity(config, data), **whose}


@dataclass(frozen=True)
class RunRecord:
    """The id and the options by which the checkpoints of a run are told from those of any other."""

    run_id: str | None
    """The id; None where every file that had it is lost."""
    saved: Saved | None
    """What `saved.json` holds; None where it is lost, or of another run."""
    options: Mapping[str, Any]
    """Dotted key -> value, of the options that may be changed."""
    past_options: frozenset[tuple[str, str]]
    """(dotted key, value as JSON) of these and of all that the run has had before."""

    @classmethod
    def read(cls, folder: Path, own: TrainConfig) -> RunRecord:
        """The record of the run in `folder`, whose `config.yaml` is `own`."""
        facts, saved = Facts.read(folder / FACTS_FILE), Saved.read(folder / SAVED_FILE)
        facts = facts if facts.is_whole else Facts()
        run_id = facts.run_id or (saved.run_id if saved.is_whole else None)
        options, began_with = changeable_options(own), facts.model_extra or {}
        known: list[Mapping[str, Any]] = [options, {key: began_with.get(key) for key in options}]
        with suppress(OSError):
            for line in read_lines(folder / RESUMES_FILE, Resumption):
                known += [{key: value} for key, pair in line.changes.items() for value in pair]
        past = {
            (key, json.dumps(value)) for values in known for key, value in flatten(values).items()
        }
        is_ours = saved.is_whole and saved.run_id == run_id
        return cls(run_id, saved if is_ours else None, flatten(options), frozenset(past))

    def refusal(self, identity: Mapping[str, Any]) -> str | None:
        """Why a checkpoint with this identity is of another run; None where it is of this one.

        A copy of the run that was resumed with other options has its id, and is told by those.

        Args:
            identity: plain values, not too deep.
        """
        run_id, made_with = identity.get(RUN_ID), identity.get(CHANGEABLE)
        if not (run_id and isinstance(run_id, str) and isinstance(made_with, Mapping)):
            return "does not say of which run it is: an older version wrote it, or another program"
        if self.run_id not in (None, run_id):
            return f"is of another run ({run_id:.16}, this one is {self.run_id:.16})"
        for key, value in flatten(made_with).items():
            if (key, json.dumps(value)) not in self.past_options:
                return (
                    f"was made with {key} {value!s:.60}, but this run has {self.options.get(key)} in "
                    f"{CONFIG_FILE} and no other in {RESUMES_FILE}"
                )
        return None


def check_documents(folder: Path, now: Documents, instead: str = "start a new run") -> None:
    """ConfigError that names the first document which is not what the run began with.

    Where the run's list is lost, the checkpoint still knows that the corpus is another.

    Args:
        instead: what else may be done than to put the corpus back.
    """
    try:
        began_with = Documents.from_dict(read_object(folder / DOCUMENTS_FILE))
    except ConfigError:
        return
    if change := changed(began_with, now):
        raise ConfigError(
            f"data.corpus: {change}, since '{folder}' began; put back what it was, or {instead}"
        )
