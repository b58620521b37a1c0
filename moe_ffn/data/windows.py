"""Where the sequences lie in a row of tokens: pure arithmetic on (seed, epoch)."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from moe_ffn.errors import ConfigError


def require_window(seq_len: int, num_tokens: int, of: str) -> None:
    """Raises ConfigError where the tokens `of` something hold no sequence and its next token."""
    if num_tokens < seq_len + 1:
        raise ConfigError(
            f"data.seq_len ({seq_len}) must be shorter than {of} ({num_tokens} tokens): lower "
            "data.seq_len, give more text, or move data.validation_percent between the splits"
        )


def windows_per_epoch(num_tokens: int, seq_len: int) -> int:
    """Windows of seq_len + 1 tokens in an epoch: one less than fit, so that it can start anywhere."""
    window = seq_len + 1
    return max(1, (num_tokens + 1) // window - 1)


@lru_cache(maxsize=2)  # a batch touches one epoch, or the end of one and the start of the next
def epoch_starts(num_tokens: int, seq_len: int, seed: int, epoch: int) -> np.ndarray:
    """Where the windows of an epoch start, in visiting order: (windows_per_epoch,) int64.

    The windows lie side by side from a random offset on; offset and order depend on
    (seed, epoch) alone.
    """
    window = seq_len + 1
    count = windows_per_epoch(num_tokens, seq_len)
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    offset = random.integers(num_tokens - count * window, endpoint=True)
    starts = random.permutation(count)
    starts *= window  # in place: of a large corpus there are many
    starts += offset
    starts.flags.writeable = False
    return starts


def spread_starts(num_tokens: int, seq_len: int, count: int) -> np.ndarray:
    """Where at most `count` windows start, evenly spread and apart: (num_windows,) int64."""
    count = min(count, num_tokens // (seq_len + 1))
    return np.arange(count, dtype=np.int64) * num_tokens // count
