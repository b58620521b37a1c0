"""Losses of models that only count tokens, as baselines of a language model."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np

WORSE_THAN_UNIGRAM = (
    "worse than the unigram model, which only counts tokens: the run is too short or broken"
)
"""Remark on a validation loss above `unigram_loss`."""


class _Tokens(Protocol):
    """Sequence of token ids whose slices are arrays: an array, or files that are read on demand."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: slice, /) -> Any: ...


def unigram_loss(train_tokens: _Tokens, validation_targets: _Tokens, vocab_size: int) -> float:
    """Return the cross-entropy, in nats per token, of a model that knows only how often each token occurs.

    Its probabilities are the add-one-smoothed frequencies p(v) = (count(v) + 1) / (num_counted + vocab_size).
    At most 2**28 tokens are counted, in evenly spaced chunks.

    Args:
        train_tokens: (num_tokens,) ids below `vocab_size`, which may be memory-mapped.
        validation_targets: (num_targets,) ids to predict, see `ValidationBatches`.
    """
    train = _counts(train_tokens, vocab_size)
    validation = _counts(validation_targets, vocab_size)
    nats = np.log(train.sum() + vocab_size) - np.log(train + 1)
    return float(validation @ nats / validation.sum())


_CHUNK, _MAX_CHUNKS = 1 << 20, 1 << 8


def _counts(tokens: _Tokens, vocab_size: int) -> np.ndarray:
    """Return how often each id occurs, (vocab_size,). Counts in chunks, because bincount copies to int64."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    step = max(len(tokens) / _MAX_CHUNKS, _CHUNK)
    for start in map(round, np.arange(0, len(tokens), step)):
        counts += np.bincount(tokens[start : start + _CHUNK], minlength=vocab_size)
    return counts


def ngram_loss(
    train_NS: np.ndarray, validation_MS: np.ndarray, vocab_size: int, order: int = 5
) -> float:
    """Return the cross-entropy of an n-gram model with modified Kneser-Ney smoothing, in nats per token.

    The model interpolates the orders 1 to `order` (Chen and Goodman 1999, "An empirical study of smoothing
    techniques for language modeling", section 3)::

        p(w | h) = (c(h w) - D + D(h) p(w | h without its first token)) / c(h)

    c(h w) counts occurrences in the highest order, and the distinct tokens before h w in the others. c(h) and
    D(h) are the sums of c(h w) and of its discount D over w. A token that follows fewer than `order` - 1
    others in its window is predicted with those that it has.

    Args:
        train_NS: (N, S) token ids that the model has read; no gram crosses a window.
        validation_MS: (M, S) token ids; all but the first one of a window are predicted.
    """
    num_read, longest = train_NS.shape
    order = min(order, longest)
    tokens = np.concatenate([train_NS, validation_MS])
    # Number of the gram of each length that ends at a position, and the keys of the distinct grams. The gram
    # without tokens also ends before the first position.
    ids: list[np.ndarray] = [np.zeros((len(tokens), longest + 1), np.int32)]
    keys = [np.zeros(1, np.int64)]
    for length in range(1, order + 1):
        key = ids[-1][:, :-1].astype(np.int64) * vocab_size + tokens[:, length - 1 :]
        distinct, numbers = np.unique(key, return_inverse=True)
        ids.append(numbers.astype(np.int32).reshape(key.shape))
        keys.append(distinct)
    probability_MS = np.full(validation_MS.shape, 1 / vocab_size)
    for length in range(1, order + 1):
        counted = ids[length][:num_read]
        if length < order:
            suffixes = np.full(len(keys[length + 1]), -1)
            suffixes[ids[length + 1][:num_read]] = counted[:, 1:]
            counted = suffixes[suffixes >= 0]
        counts = np.bincount(counted.ravel(), minlength=len(keys[length]))
        discounts = _discounts(counts)[np.minimum(counts, 3)]
        context_of, num_contexts = keys[length] // vocab_size, len(keys[length - 1])
        totals = np.bincount(context_of, counts, minlength=num_contexts)
        removed = np.bincount(context_of, discounts, minlength=num_contexts)
        gram = ids[length][num_read:]
        context = context_of[gram]
        shorter = probability_MS[:, length - 1 :]
        share = (counts - discounts)[gram] + removed[context] * shorter
        np.divide(share, totals[context], out=shorter, where=totals[context] > 0)
    return float(-np.log(probability_MS[:, 1:]).mean())


def _discounts(counts: np.ndarray) -> np.ndarray:
    """Return the discounts of counts 0, 1, 2 and more; half the count if too few grams occur so often."""
    n1, n2, n3, n4 = (float((counts == count).sum()) for count in range(1, 5))
    estimates = np.array([0.0, 0.5, 1.0, 1.5])
    if n1 and n2 and n3:
        ratio = n1 / (n1 + 2 * n2)
        found = np.array(
            [0, 1 - 2 * ratio * n2 / n1, 2 - 3 * ratio * n3 / n2, 3 - 4 * ratio * n4 / n3]
        )
        estimates = np.where(found > 0, found, estimates)
    return estimates
