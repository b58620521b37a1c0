"""Whether a model fits into the memory there is: asked before it is made, and said when it did not."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from moe_ffn.cli.exit import EXIT_FAILED
from moe_ffn.cli.memory import gigabytes, memory_limit, out_of_memory
from moe_ffn.errors import ConfigError
from moe_ffn.runs.config import TrainConfig

_BYTES_VOCABULARY = 257
_FLOAT32 = 4
_INT64 = 8


def check_fits(config: TrainConfig) -> None:
    """ConfigError where the weights alone, or the token ids of one batch, exceed what this process may have.

    What training needs is several times more, and may be on a GPU; this finds slips of the keyboard.
    """
    memory = memory_limit()
    if memory is None:
        return
    num_params = _num_params(config)
    if num_params * _FLOAT32 > memory:
        raise ConfigError(
            f"model: {num_params:,} parameters take {gigabytes(num_params * _FLOAT32)}, and this "
            f"process may have {gigabytes(memory)} of memory; lower model.d_model "
            f"({config.model.d_model}), model.num_layers ({config.model.num_layers}) or what is wide "
            "in model.ffn"
        )
    num_tokens = config.data.batch_size * config.data.seq_len
    if num_tokens * _INT64 > memory:
        raise ConfigError(
            f"data: batch_size ({config.data.batch_size}) times seq_len ({config.data.seq_len}) is "
            f"{gigabytes(num_tokens * _INT64)} of token ids, and this process may have "
            f"{gigabytes(memory)} of memory; lower one of them"
        )


@contextmanager
def saying_what_it_needs(config: TrainConfig) -> Iterator[None]:
    """Memory that is not to be had ends the block with what the model needs, and exit code 1."""
    try:
        yield
    except Exception as error:
        if not (sentence := out_of_memory(error)):
            raise
        print(f"error: {sentence}; {_needs(config)}", file=sys.stderr)
        raise SystemExit(EXIT_FAILED) from None


def _needs(config: TrainConfig) -> str:
    num_params, model, data = _num_params(config), config.model, config.data
    return (
        f"the weights of {num_params:,} parameters and their gradients take "
        f"{gigabytes(2 * num_params * _FLOAT32)}, and the optimizer states and a batch's activations come on "
        f"top: lower data.batch_size ({data.batch_size}), data.seq_len ({data.seq_len}), model.num_layers "
        f"({model.num_layers}) or model.d_model ({model.d_model})"
    )


def _num_params(config: TrainConfig) -> int:
    vocab_size = getattr(config.data.tokenizer, "vocab_size", _BYTES_VOCABULARY)
    return config.model.num_params(vocab_size, config.data.seq_len)
