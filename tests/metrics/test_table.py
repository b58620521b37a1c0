"""The tables of metrics are complete; `moe_ffn.metrics` gives every measure by name."""

from __future__ import annotations

import ast
import importlib
import math
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import moe_ffn
import moe_ffn.metrics as metrics
from moe_ffn.balancing.losses import BALANCING_LOSSES
from moe_ffn.metrics import baselines, ngram_loss, unigram_loss
from moe_ffn.metrics.measures import LayerBatch
from moe_ffn.metrics.modular import LanguageMetrics
from moe_ffn.metrics.table import (
    LAYER_METRICS,
    RUN_METRICS,
    Metric,
    compute,
    measured_in,
    result_columns,
    statistics_of,
)

ALL = [*LAYER_METRICS.values(), *RUN_METRICS.values()]


@pytest.mark.parametrize("metric", ALL, ids=lambda metric: metric.key)
def test_every_metric_entry_is_complete(metric: Metric) -> None:
    table = RUN_METRICS if metric.rows else LAYER_METRICS
    assert table[metric.key] is metric
    assert all((metric.title, metric.formula, metric.healthy))
    assert metric.axis() or metric.per == "expert"
    assert "\n" not in metric.formula
    assert "|" not in metric.formula + metric.healthy
    assert not metric.formula.endswith(".")
    is_at_row_end = not metric.rows and metric.measured in ("row", "probe")
    assert (metric.row_end is not None) == is_at_row_end
    is_of_routings = not metric.rows and not is_at_row_end
    assert ((metric.measure or metric.pairs_only_measure) is not None) == is_of_routings


def test_titles_and_axes_distinguish_metrics() -> None:
    titles = [metric.title for metric in ALL]
    assert len(set(titles)) == len(titles)
    assert not RUN_METRICS.keys() & BALANCING_LOSSES.keys(), "both stand in a row as train/NAME"
    assert all(metric.label for metric in result_columns())


def test_statistics_of_one_name_are_one_statistic() -> None:
    metrics = list(LAYER_METRICS.values())
    names = [statistic.name for statistic in statistics_of(metrics)]
    assert len(set(names)) == len(names)


def test_shapes_are_those_of_the_axes(make_routing: Any) -> None:
    metrics = measured_in("every batch", "last step", "validation")
    routing = make_routing([[0, 1], [2, 0]], 3)
    sums = {s.name: s.add(s.zeros(3), LayerBatch(routing)) for s in statistics_of(metrics)}
    for statistic in statistics_of(metrics):
        assert sums[statistic.name].shape == statistic.zeros(3).shape, statistic.name
        assert sums[statistic.name].dtype == statistic.dtype, statistic.name
    shapes = {"layer": (), "expert": (3,), "pair": (3, 3)}
    for key, value in compute(metrics, sums).items():
        assert value.shape == torch.Size(shapes[LAYER_METRICS[key].per]), key


ROOM = Path(metrics.__file__).parent
CLASSES = {
    *("CoactivationMetrics", "LanguageMetrics", "PairsOnlyMetrics"),
    *("LoadMetrics", "TokenMetrics"),
}


def test_every_public_measure_of_the_room_is_exported() -> None:
    defined = {
        node.name
        for name in ("baselines", "functional", "modular")
        for node in ast.parse((ROOM / f"{name}.py").read_text()).body
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)) and not node.name.startswith("_")
    }
    assert set(metrics.__all__) == defined


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(
        AttributeError, match=r"module 'moe_ffn\.metrics' has no attribute 'maxvio'"
    ):
        _ = metrics.maxvio


def test_functions_work_without_torchmetrics_and_classes_name_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A None in the place of a module stops every import of it.
    monkeypatch.setitem(sys.modules, "torchmetrics", None)
    for name in [name for name in sys.modules if name.startswith("moe_ffn.metrics")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(moe_ffn, "metrics", metrics)  # as it was, once this test is over
    anew = importlib.import_module("moe_ffn.metrics")

    assert anew is not metrics
    assert anew.max_violation(torch.tensor([0.5, 0.5])).item() == 0
    for name in metrics.__all__:
        if name not in CLASSES:
            assert getattr(anew, name).__name__ == name
            continue
        with pytest.raises(ModuleNotFoundError) as raised:
            getattr(anew, name)
        assert str(raised.value) == (
            f"moe_ffn.metrics.{name} needs torchmetrics: pip install torchmetrics (the "
            "functions of moe_ffn.metrics.functional need only torch)"
        )


# -- the loss of a language model


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


def test_sums_stay_float64_in_a_converted_model() -> None:
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
    monkeypatch.setattr(baselines, "_CHUNK", 7)
    assert unigram_loss(train, targets, vocab_size=50) == whole


def test_evenly_spaced_chunks_represent_many_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(0)
    train, targets = random.integers(0, 50, 1000), random.integers(0, 50, 20)
    chunks = np.concatenate([train[start : start + 30] for start in (0, 250, 500, 750)])
    expected = unigram_loss(chunks, targets, vocab_size=50)
    monkeypatch.setattr(baselines, "_CHUNK", 30)
    monkeypatch.setattr(baselines, "_MAX_CHUNKS", 4)
    # Of the targets too, which are fewer than that.
    assert unigram_loss(train, targets, vocab_size=50) == expected


class NGrams:
    """An n-gram model with modified Kneser-Ney smoothing, written as its formula is."""

    def __init__(self, windows: list[list[int]], vocab_size: int, order: int) -> None:
        self.vocab_size = vocab_size
        grams = {
            n: [tuple(w[i : i + n]) for w in windows for i in range(len(w) - n + 1)]
            for n in range(1, order + 1)
        }
        self.counts = {order: Counter(grams[order])}
        self.counts |= {n: Counter(g[1:] for g in {*grams[n + 1]}) for n in range(1, order)}

    def discount(self, length: int, count: int) -> float:
        ones, twos, threes, fours = (
            sum(c == n for c in self.counts[length].values()) for n in range(1, 5)
        )
        if not count:
            return 0
        if not (ones and twos and threes):
            return min(count, 3) / 2
        y = ones / (ones + 2 * twos)
        found = [1 - 2 * y * twos / ones, 2 - 3 * y * threes / twos, 3 - 4 * y * fours / threes]
        best = found[min(count, 3) - 1]
        return best if best > 0 else min(count, 3) / 2

    def probability(self, context: tuple[int, ...], token: int) -> float:
        shorter = self.probability(context[1:], token) if context else 1 / self.vocab_size
        length = len(context) + 1
        followers = {g: c for g, c in self.counts[length].items() if g[:-1] == context}
        if not followers:
            return shorter
        count = followers.get((*context, token), 0)
        removed = sum(self.discount(length, c) for c in followers.values())
        kept = count - self.discount(length, count)
        return (kept + removed * shorter) / sum(followers.values())


@pytest.mark.parametrize("order", [1, 2, 3, 5])
@pytest.mark.parametrize("windows", [3, 30])  # too few grams to estimate the discounts, and enough
def test_the_ngram_loss_is_that_of_the_formula(order: int, windows: int) -> None:
    random = np.random.default_rng(order)
    # Tokens 6 and 7 are asked for, but never read.
    train = random.integers(0, 4, (windows, 9)) * random.integers(0, 3, (windows, 9))
    validation = random.integers(0, 8, (4, 9))
    model = NGrams(train.tolist(), 8, order)
    asked = [
        (tuple(window[max(0, i - order + 1) : i]), window[i])
        for window in validation.tolist()
        for i in range(1, 9)
    ]
    for context in {context for context, _ in asked}:
        assert sum(model.probability(context, token) for token in range(8)) == pytest.approx(1)
    expected = -np.mean([math.log(model.probability(*pair)) for pair in asked])

    found = ngram_loss(train.astype(np.uint16), validation.astype(np.uint16), 8, order)

    assert found == pytest.approx(expected, rel=1e-12)


def test_windows_shorter_than_the_order_are_predicted_with_what_they_have() -> None:
    train, validation = np.array([[0, 1], [0, 1], [1, 0]]), np.array([[0, 1], [1, 0]])
    assert ngram_loss(train, validation, 2) == ngram_loss(train, validation, 2, order=2)
    assert ngram_loss(train[:0], validation, 2) == pytest.approx(math.log(2)), "nothing was read"


def test_every_token_has_its_bytes() -> None:
    message = r"^num_bytes must have the shape of nats, \(3,\), but has \(2,\)$"
    with pytest.raises(ValueError, match=message):
        LanguageMetrics().update(torch.ones(3), torch.ones(2))
