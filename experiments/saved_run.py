"""A run's best model, read back from its folder."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch

from experiments.command_line import read_config
from experiments.config import TrainConfig
from experiments.run_folder import (
    BEST_CHECKPOINT,
    CONFIG_FILE,
    TOKENIZER_FILE,
    check_has_weights,
)
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.errors import ConfigError, first_line
from moe_ffn.model.decoder import Decoder

_PREFIX = "decoder."


@dataclass(frozen=True)
class SavedRun:
    config: TrainConfig
    tokenizer: Tokenizer
    decoder: Decoder


def load_run(folder: Path) -> SavedRun:
    """The config, the tokenizer and the best weights of a run.

    Raises:
        ConfigError: this is no run's folder, or one without a checkpoint, or a file of it is damaged.
    """
    check_has_weights(folder)
    config = read_config(folder / CONFIG_FILE, TrainConfig)
    tokenizer = _read_tokenizer(folder / TOKENIZER_FILE, config)
    decoder = config.model.build(tokenizer.vocab_size, config.data.seq_len)
    checkpoint = torch.load(folder / BEST_CHECKPOINT, map_location="cpu", weights_only=True)
    state = {
        name.removeprefix(_PREFIX): value
        for name, value in checkpoint["state_dict"].items()
        if name.startswith(_PREFIX)
    }
    try:
        decoder.load_state_dict(state)
    except RuntimeError as error:
        raise ConfigError(
            f"'{folder / CONFIG_FILE}' describes another model than {BEST_CHECKPOINT} holds; "
            "one of the two is not of this run"
        ) from error
    return SavedRun(config, tokenizer, decoder.eval())


def _read_tokenizer(path: Path, config: TrainConfig) -> Tokenizer:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        return config.data.tokenizer.restore(values)
    except Exception as error:  # of whatever kind: what is wrong is in the file
        raise ConfigError(
            f"'{path}' is not the tokenizer that this run was trained with: {first_line(error)}"
        ) from error
