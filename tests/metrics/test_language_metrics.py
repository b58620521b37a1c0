from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from moe_ffn.metrics import functional, unigram_loss
from moe_ffn.metrics.modular import LanguageMetrics


@pytest.mark.parametrize(
    ("batches", "loss", "bits"),
    [
        # 1.5 nats each, which stand for 3, 1, 0 and 4 bytes: 6 nats / ln 2 = 8.65617 bits over 8 bytes.
        ([([1.0, 2.0, 2.0, 1.0], [3, 1, 0, 4])], 1.5, 1.0820213),
        ([([math.log(256)] * 6, [1] * 6)], math.log(256), 8),
        # (1 * 3 + 5 * 1) / 4 tokens; the mean of the batches' means would be 3.
        ([([1.0] * 3, [1] * 3), ([5.0], [1])], 2, 2 / math.log(2)),
    ],
    ids=["per token and per byte", "a uniform model of bytes", "batches count by their tokens"],
)
def test_loss_and_bits(
    batches: list[tuple[list[float], list[int]]], loss: float, bits: float
) -> None:
    metrics = LanguageMetrics()
    for nats, num_bytes in batches:
        metrics.update(torch.tensor(nats), torch.tensor(num_bytes))
    values = metrics.compute()
    assert metrics.loss_so_far.item() == values["loss"].item() == pytest.approx(loss)
    assert values["bits_per_byte"].item() == pytest.approx(bits, abs=1e-6)


def test_sums_keep_their_digits_in_a_model_that_is_converted() -> None:
    # bfloat16 has eight bits: 257 would be 256.
    model = torch.nn.ModuleDict({"metrics": LanguageMetrics()}).to(torch.bfloat16)
    metrics = model["metrics"]
    assert isinstance(metrics, LanguageMetrics)
    metrics.update(torch.full((257,), 1.001), torch.ones(257))
    assert metrics.compute()["loss"].item() == pytest.approx(1.001, rel=1e-6)
    metrics.reset()
    assert metrics.nats.dtype == torch.float64


@pytest.mark.parametrize(
    "batches",
    [
        # In float32 the sum would be 2^25, in bfloat16 it would stop growing at 256.
        [torch.tensor([2.0**25]), torch.tensor([1.0])],
        [torch.ones(1000, dtype=torch.bfloat16)],
    ],
)
def test_a_long_validation_keeps_its_digits(batches: list[torch.Tensor]) -> None:
    metrics = LanguageMetrics()
    for nats in batches:
        metrics.update(nats, torch.ones(len(nats)))
    assert metrics.nats.item() == sum(nats.double().sum().item() for nats in batches)


def test_the_unigram_loss_equals_the_one_worked_by_hand() -> None:
    train = np.array([0, 0, 0, 1, 1], dtype=np.uint16)
    targets = np.array([0, 0, 1, 2], dtype=np.uint16)
    # 5 tokens and 3 ids: p = (3+1)/8, (2+1)/8, (0+1)/8.
    expected = -(2 * math.log(4 / 8) + math.log(3 / 8) + math.log(1 / 8)) / 4
    assert unigram_loss(train, targets, vocab_size=3) == pytest.approx(expected, rel=1e-12)


def test_counting_in_chunks_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    train, targets = random.integers(0, 50, 1000), random.integers(0, 50, 100)
    whole = unigram_loss(train, targets, vocab_size=50)
    monkeypatch.setattr(functional, "_CHUNK", 7)
    assert unigram_loss(train, targets, vocab_size=50) == whole


def test_of_many_tokens_chunks_that_lie_evenly_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    train, targets = random.integers(0, 50, 1000), random.integers(0, 50, 20)
    chunks = np.concatenate([train[start : start + 30] for start in (0, 250, 500, 750)])
    expected = unigram_loss(chunks, targets, vocab_size=50)
    monkeypatch.setattr(functional, "_CHUNK", 30)
    monkeypatch.setattr(functional, "_MAX_CHUNKS", 4)
    # Of the targets too, which are fewer than that.
    assert unigram_loss(train, targets, vocab_size=50) == expected


def test_every_token_has_its_bytes() -> None:
    message = r"^num_bytes must have the shape of nats, \(3,\), but has \(2,\)$"
    with pytest.raises(ValueError, match=message):
        LanguageMetrics().update(torch.ones(3), torch.ones(2))
