"""Batches as pure functions of their index: the same in any order, after any interruption.

B sequences in a batch, S tokens in a sequence.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from moe_ffn.config import require_count
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


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences, and for each of their tokens the one that follows."""

    input_ids: Tensor
    """(B, S) int64."""

    target_ids: Tensor
    """(B, S) int64: `input_ids` one token later."""


@dataclass(frozen=True, eq=False)
class TrainBatches:
    """The endless row of training batches; each depends on the fields and its index alone.

    An epoch visits each of its windows of seq_len + 1 tokens once, in an order and from an
    offset drawn from (seed, epoch). A batch may end one epoch and begin the next.

    Of a batch, rank r of W holds the rows [r*B/W, (r+1)*B/W): together they see what one would.
    """

    tokens: np.ndarray
    """(num_tokens,) of any integer type."""

    seq_len: int
    batch_size: int
    """Sequences in a batch, summed over all ranks."""

    seed: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        _check_numbers(self.tokens, self.seq_len, self.batch_size)
        require_count(self.world_size, "world_size")
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank ({self.rank}) must lie in [0, world_size), and that is {self.world_size}"
            )
        require_window(self.seq_len, len(self.tokens), "the train split")
        require_equal_shares(self.batch_size, self.world_size)

    @property
    def windows_per_epoch(self) -> int:
        """Sequences in a pass over the tokens; the few at the ends vary with the epoch."""
        return windows_per_epoch(len(self.tokens), self.seq_len)

    def __getitem__(self, index: int) -> Batch:
        """Micro-batch `index`, counted from 0 over the whole training; there is no last one."""
        if index < 0:
            raise IndexError(f"index ({index}) must not be negative: the batches have no end")
        rows = self.batch_size // self.world_size
        first = index * self.batch_size + self.rank * rows
        return _batch(self.tokens, self._starts(first, first + rows), self.seq_len)

    def _starts(self, first: int, end: int) -> np.ndarray:
        """Where windows number `first` up to `end`, counted over all epochs, start."""
        count = self.windows_per_epoch
        parts = []
        while first < end:
            epoch, place = divmod(first, count)
            starts = epoch_starts(len(self.tokens), self.seq_len, self.seed, epoch)
            parts.append(starts[place : place + end - first])
            first += len(parts[-1])
        return np.concatenate(parts)


@dataclass(frozen=True, eq=False)
class ValidationBatches:
    """The fixed batches of a validation: windows spread over the split, none overlapping."""

    tokens: np.ndarray
    """(num_tokens,) of any integer type."""

    seq_len: int
    batch_size: int
    """Sequences in a batch; the last one may hold fewer."""

    num_tokens: int
    """How many tokens to predict, rounded to whole sequences, of which there is at least one."""

    def __post_init__(self) -> None:
        _check_numbers(self.tokens, self.seq_len, self.batch_size)
        require_window(self.seq_len, len(self.tokens), "the validation split")

    def __len__(self) -> int:
        return -(-len(self._starts) // self.batch_size)

    def __getitem__(self, index: int) -> Batch:
        if not 0 <= index < len(self):
            raise IndexError(f"index ({index}) must lie in [0, {len(self)})")
        first = index * self.batch_size
        return _batch(self.tokens, self._starts[first : first + self.batch_size], self.seq_len)

    @property
    def _starts(self) -> np.ndarray:
        wanted = max(1, self.num_tokens // self.seq_len)
        return spread_starts(len(self.tokens), self.seq_len, wanted)

    @property
    def targets(self) -> np.ndarray:
        """Every token that is predicted, in order: (num_windows * seq_len,), as in `tokens`."""
        return _windows(self.tokens, self._starts, self.seq_len)[:, 1:].reshape(-1)


def require_equal_shares(batch_size: int, world_size: int) -> None:
    """ConfigError where the ranks cannot each take an equal part of every batch."""
    if batch_size % world_size:
        raise ConfigError(
            f"data.batch_size ({batch_size}) must be divisible by the number of ranks "
            f"({world_size}): it counts the sequences of all ranks together"
        )


def _check_numbers(tokens: np.ndarray, seq_len: int, batch_size: int) -> None:
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise ConfigError(
            f"tokens must be whole numbers in one row, but are {tokens.dtype} of shape {tokens.shape}"
        )
    require_count(seq_len, "data.seq_len")
    require_count(batch_size, "data.batch_size")


def _windows(tokens: np.ndarray, starts: np.ndarray, seq_len: int) -> np.ndarray:
    return np.stack([tokens[start : start + seq_len + 1] for start in starts])


def _batch(tokens: np.ndarray, starts: np.ndarray, seq_len: int) -> Batch:
    windows = torch.from_numpy(_windows(tokens, starts, seq_len).astype(np.int64))
    return Batch(windows[:, :-1].contiguous(), windows[:, 1:].contiguous())
