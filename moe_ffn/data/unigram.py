"""The loss of a model that knows only how often each token occurs: what any other has to beat."""

from __future__ import annotations

import numpy as np

WORSE_THAN_UNIGRAM = "worse than the unigram model, which only counts tokens: too short, or broken"
"""What is said of a run whose validation loss is above it."""

_CHUNK = 1 << 20


def unigram_loss(
    train_tokens: np.ndarray, validation_targets: np.ndarray, vocab_size: int
) -> float:
    """Mean nats per token of `validation_targets` under the add-one-smoothed frequencies of
    `train_tokens`.

    p(v) = (count(v) + 1) / (num_train_tokens + vocab_size). Both arrays are (num_tokens,) of ids
    below `vocab_size`; `ValidationBatches.targets` are the tokens a validation looks at.
    """
    train = _counts(train_tokens, vocab_size)
    validation = _counts(validation_targets, vocab_size)
    nats = np.log(len(train_tokens) + vocab_size) - np.log(train + 1)
    return float(validation @ nats / len(validation_targets))


def _counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each id occurs, (vocab_size,); in chunks, since bincount copies to int64."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK):
        counts += np.bincount(tokens[start : start + _CHUNK], minlength=vocab_size)
    return counts
