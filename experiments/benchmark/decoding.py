"""A few tokens through the layer, forward alone: what generating text asks of it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor, nn

from experiments.benchmark.equivalence import same_rows
from experiments.benchmark.layers import AUTO, Layer
from experiments.benchmark.peers import HF_BATCHED, HF_EAGER, HF_GROUPED
from experiments.benchmark.plot import Plot
from experiments.benchmark.report import duration, table
from experiments.benchmark.session import Session
from experiments.benchmark.shapes import Shape
from experiments.benchmark.timing import Timed

SHAPE = Shape(1, 512, 512, 8, 2, "fp32")
NUM_TOKENS = (1, 2, 4, 8, 16)

CALLS = 20
"""In a row on the clock; one takes a fraction of a millisecond."""


def as_decoding(layer: Layer, source: nn.Module, x_BSD: Tensor) -> Layer:
    """The layer in evaluation mode, with what it computes there: without gradients it may go another way."""
    layer.module.eval()
    with torch.no_grad():
        wanted_TD = source.eval()(x_BSD).hidden.flatten(0, -2)
        found_TD = layer(x_BSD).flatten(0, -2)
    if layer.is_comparable and not same_rows(found_TD, wanted_TD).all():
        return replace(layer, computes="DIFFERS without gradients")
    return layer


def run(session: Session) -> None:
    session.say(f"{SHAPE} and on, forward alone, evaluation mode, median of one call")
    points = {f"T {t}": replace(SHAPE, num_tokens=t) for t in NUM_TOKENS}
    layers: dict[str, list[Layer]] = {}
    candidates: dict[str, Timed] = {}
    for point, shape in points.items():
        case = session.case(shape)
        x_BSD = case.tokens.x_BSD.detach()
        layers[point] = [
            as_decoding(layer, case.source, x_BSD)
            for layer in session.sparse_layers(case, (HF_EAGER, HF_GROUPED, HF_BATCHED))
        ]
        for layer in layers[point]:
            candidates[f"{layer.name} {point}"] = layer.decoding_pass(x_BSD, CALLS)
    timings = session.time(candidates)
    for point, shape in points.items():
        session.keep("decoding", point, shape, layers[point], timings, to=AUTO, label=f" {point}")
    names = list(dict.fromkeys(layer.name for point in points for layer in layers[point]))
    medians = {
        name: {
            point: timings[f"{name} {point}"].median
            for point in points
            if f"{name} {point}" in timings
        }
        for name in names
    }
    rows = [
        [name, *(duration(found[point]) if point in found else "-" for point in points)]
        for name, found in medians.items()
    ]
    session.say(table(["layer", *points], rows))
    for point in points:
        for peer in (HF_EAGER, HF_BATCHED):
            pair = (f"{AUTO} {point}", f"{peer} {point}")
            session.promise_ratio("decoding", "", f"time / {peer}, {point}", 1.0, timings, pair)
    session.plots["decoding"] = Plot(
        title="Forward pass of a few tokens, without gradients",
        x_label="number of tokens",
        y_label="microseconds",
        series={
            name: [(points[point].num_tokens, 1e6 * median) for point, median in found.items()]
            for name, found in medians.items()
        },
    )
