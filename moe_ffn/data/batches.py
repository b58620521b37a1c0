"""Batches as pure functions of their index, so that a resumed run reads the same batches.

B sequences per batch, S tokens per sequence. A window is a sequence and the token after it: S + 1 tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from moe_ffn.config.errors import ConfigError
from moe_ffn.data.token_files import TokenSequence


def require_window(seq_len: int, num_tokens: int, text_name: str) -> None:
    """Raise ConfigError if a text of `num_tokens` is too short for one window."""
    if num_tokens < seq_len + 1:
        raise ConfigError(
            f"data.seq_len ({seq_len}) must be shorter than {text_name} ({num_tokens} tokens): lower "
            "data.seq_len, give more text, or change data.validation_percent"
        )


def require_equal_shares(batch_size: int, world_size: int) -> None:
    """Raise ConfigError if the ranks cannot take equal shares of every batch."""
    if batch_size % world_size:
        next_multiple = (batch_size // world_size + 1) * world_size
        raise ConfigError(
            f"data.batch_size ({batch_size}) must be divisible by the number of ranks "
            f"({world_size}): it counts the sequences of all ranks together; give {next_multiple}, or change "
            "the number of ranks"
        )


def windows_per_epoch(num_tokens: int, seq_len: int) -> int:
    """Return the windows per epoch: one less than fit, so that an epoch can start at any offset."""
    return max(1, (num_tokens + 1) // (seq_len + 1) - 1)


MAX_LISTED = 1 << 22
"""Windows per epoch above which their order is computed on demand instead of stored in memory."""


@dataclass(frozen=True)
class EpochStarts:
    """First token of each window of an epoch, in training order; slicing returns an int64 array."""

    window: int
    offset: int
    order: np.ndarray | FeistelOrder

    def __getitem__(self, indices: slice) -> np.ndarray:
        return self.order[indices] * self.window + self.offset


@lru_cache(maxsize=2)  # a batch may span two epochs
def epoch_starts(num_tokens: int, seq_len: int, seed: int, epoch: int) -> EpochStarts:
    """Return the windows of an epoch, adjacent from a random offset; both depend only on (seed, epoch)."""
    window = seq_len + 1
    count = windows_per_epoch(num_tokens, seq_len)
    random = np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, epoch])))
    offset = int(random.integers(num_tokens - count * window, endpoint=True))
    is_long = count > MAX_LISTED
    order = FeistelOrder.drawn(count, random) if is_long else random.permutation(count)
    return EpochStarts(window, offset, order)


@dataclass(frozen=True)
class FeistelOrder:
    """Random permutation of 0 to `count` - 1 that computes a slice without computing the rest.

    A Feistel network permutes all numbers of 2 * `half_bits` bits. A result of `count` or more is permuted
    again until it is smaller (cycle walking: Black and Rogaway 2002, "Ciphers with arbitrary finite
    domains").
    """

    count: int
    half_bits: int
    keys: tuple[np.uint64, ...]

    @classmethod
    def drawn(cls, count: int, random: np.random.Generator) -> FeistelOrder:
        keys = random.integers(2**64, size=_ROUNDS, dtype=np.uint64, endpoint=False)
        return cls(count, max(1, -(-(count - 1).bit_length() // 2)), tuple(keys))

    def __getitem__(self, indices: slice) -> np.ndarray:
        values = self._permute(np.arange(*indices.indices(self.count), dtype=np.uint64))
        while (outside := values >= self.count).any():
            values[outside] = self._permute(values[outside])
        return values.astype(np.int64)

    def _permute(self, values: np.ndarray) -> np.ndarray:
        bits, mask = np.uint64(self.half_bits), np.uint64((1 << self.half_bits) - 1)
        left, right = values >> bits, values & mask
        for key in self.keys:
            left, right = right, left ^ (_mix(right ^ key) & mask)
        return (left << bits) | right


_ROUNDS = 6


def _mix(values: np.ndarray) -> np.ndarray:
    """Mix the bits of each uint64, as the last step of SplitMix64 does (Steele et al. 2014)."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))


def spread_starts(num_tokens: int, seq_len: int, count: int) -> np.ndarray:
    """Return the first token of each of at most `count` evenly spaced windows, (num_windows,) int64."""
    count = min(count, num_tokens // (seq_len + 1))
    return np.arange(count, dtype=np.int64) * num_tokens // count


@dataclass(frozen=True, eq=False)
class Batch:
    """Sequences of token ids, and the next token at each position."""

    input_ids: Tensor
    """(B, S) int64."""
    target_ids: Tensor
    """(B, S) int64: `input_ids` shifted by one token."""
    starts: Tensor | None = None
    """(B,) int64: index of each sequence's first token in its split; None if it has no split."""


@dataclass(frozen=True, eq=False)
class _Batches:
    """Batches of one split."""

    tokens: np.ndarray | TokenSequence
    """(num_tokens,) of any integer type."""
    seq_len: int
    batch_size: int
    """Sequences per batch, summed over all ranks; the last batch of a validation may have fewer."""
    split: ClassVar[str]

    def __post_init__(self) -> None:
        require_window(self.seq_len, len(self.tokens), f"the {self.split} split")

    def _windows(self, starts: np.ndarray) -> np.ndarray:
        return np.stack([self.tokens[start : start + self.seq_len + 1] for start in starts])

    def _batch(self, starts: np.ndarray) -> Batch:
        windows = torch.from_numpy(self._windows(starts).astype(np.int64))
        inputs_BS, targets_BS = windows[:, :-1].contiguous(), windows[:, 1:].contiguous()
        return Batch(inputs_BS, targets_BS, torch.from_numpy(starts))


@dataclass(frozen=True, eq=False)
class TrainBatches(_Batches):
    """Endless sequence of training batches; each depends only on the fields and its index.

    An epoch visits each of its windows once. Its order and offset are drawn from (seed, epoch). A batch may
    span two epochs. Rank r of W reads the sequences [r*B/W, (r+1)*B/W) of each batch.
    """

    seed: int
    rank: int = 0
    world_size: int = 1
    split: ClassVar[str] = "train"

    def __post_init__(self) -> None:
        super().__post_init__()
        require_equal_shares(self.batch_size, self.world_size)

    @property
    def windows_per_epoch(self) -> int:
        """Number of sequences in an epoch."""
        return windows_per_epoch(len(self.tokens), self.seq_len)

    def __getitem__(self, index: int) -> Batch:
        """Return micro-batch `index`, counted from the start of training."""
        rows = self.batch_size // self.world_size
        first = index * self.batch_size + self.rank * rows
        return self._batch(self._starts(first, first + rows))

    def windows_read(self, num_batches: int, max_tokens: int) -> np.ndarray:
        """Return the first windows of `num_batches` micro-batches of all ranks, at most `max_tokens` and each
        text once, (num_windows, S + 1).
        """
        window = self.seq_len + 1
        num_read = min(num_batches * self.batch_size, self.windows_per_epoch)
        if not num_read:  # a time limit can end a run before its first step
            return np.empty((0, window), dtype=np.int64)
        return self._windows(self._starts(0, min(num_read, max(1, max_tokens // window))))

    def _starts(self, first: int, end: int) -> np.ndarray:
        """Return the first token of the windows `first` to `end` - 1, counted from the start of training."""
        starts = []
        while first < end:
            epoch, window = divmod(first, self.windows_per_epoch)
            of_epoch = epoch_starts(len(self.tokens), self.seq_len, self.seed, epoch)
            starts.append(of_epoch[window : window + end - first])
            first += len(starts[-1])
        return np.concatenate(starts)


@dataclass(frozen=True, eq=False)
class ValidationBatches(_Batches):
    """Fixed batches of a validation: windows spread over the split without overlap."""

    num_tokens: int
    """Tokens to predict, rounded down to whole sequences; at least one sequence."""
    split: ClassVar[str] = "validation"

    def __len__(self) -> int:
        return -(-len(self._starts) // self.batch_size)

    def __iter__(self) -> Iterator[Batch]:
        return map(self.__getitem__, range(len(self)))

    def __getitem__(self, index: int) -> Batch:
        first = index * self.batch_size
        return self._batch(self._starts[first : first + self.batch_size])

    @property
    def _starts(self) -> np.ndarray:
        num_windows = max(1, self.num_tokens // self.seq_len)
        return spread_starts(len(self.tokens), self.seq_len, num_windows)

    @property
    def sha256(self) -> str:
        """Digest of all windows in order; equal digests mean that losses are comparable."""
        windows = np.ascontiguousarray(self.windows, dtype="<u4")
        return hashlib.sha256(f"{windows.shape} ".encode() + windows.tobytes()).hexdigest()

    @property
    def windows(self) -> np.ndarray:
        """All windows, (num_windows, S + 1); every token but the first of each is predicted."""
        return self._windows(self._starts)
