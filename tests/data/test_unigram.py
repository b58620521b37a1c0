from __future__ import annotations

import math

import numpy as np
import pytest

from moe_ffn.data import prepare as unigram
from moe_ffn.data.prepare import unigram_loss


def test_the_loss_equals_the_one_worked_by_hand() -> None:
    train = np.array([0, 0, 0, 1, 1], dtype=np.uint16)
    targets = np.array([0, 0, 1, 2], dtype=np.uint16)
    # 5 tokens and 3 ids: p = (3+1)/8, (2+1)/8, (0+1)/8.
    expected = -(2 * math.log(4 / 8) + math.log(3 / 8) + math.log(1 / 8)) / 4
    assert unigram_loss(train, targets, vocab_size=3) == pytest.approx(expected, rel=1e-12)


def test_nothing_seen_is_uniform() -> None:
    loss = unigram_loss(np.array([], dtype=np.uint16), np.array([3, 5]), vocab_size=8)
    assert loss == pytest.approx(math.log(8))


def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    train, targets = random.integers(0, 50, 1000), random.integers(0, 50, 100)
    whole = unigram_loss(train, targets, vocab_size=50)
    monkeypatch.setattr(unigram, "_CHUNK", 7)
    assert unigram_loss(train, targets, vocab_size=50) == whole
