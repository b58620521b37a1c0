"""Whether a model can be made on this machine, asked before anything is."""

from __future__ import annotations

import os

from experiments.config import TrainConfig
from moe_ffn.errors import ConfigError

_BYTES_VOCABULARY = 257
_FLOAT32 = 4
_INT64 = 8


def check_fits(config: TrainConfig) -> None:
    """ConfigError where the weights alone, or the token ids of one batch, exceed this machine's memory.

    What training needs is several times more, and may be on a GPU; this finds slips of the keyboard.
    """
    if not hasattr(os, "sysconf"):  # Windows
        return
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    vocab_size = getattr(config.data.tokenizer, "vocab_size", _BYTES_VOCABULARY)
    num_params = config.model.num_params(vocab_size, config.data.seq_len)
    if num_params * _FLOAT32 > memory:
        raise ConfigError(
            f"model: {num_params:,} parameters take {_gigabytes(num_params * _FLOAT32)}, and this "
            f"machine has {_gigabytes(memory)} of memory; lower model.d_model "
            f"({config.model.d_model}), model.num_layers ({config.model.num_layers}) or what is wide "
            "in model.ffn"
        )
    num_tokens = config.data.batch_size * config.data.seq_len
    if num_tokens * _INT64 > memory:
        raise ConfigError(
            f"data: batch_size ({config.data.batch_size}) times seq_len ({config.data.seq_len}) is "
            f"{_gigabytes(num_tokens * _INT64)} of token ids, and this machine has "
            f"{_gigabytes(memory)} of memory; lower one of them"
        )


def _gigabytes(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:,.0f} GB"
