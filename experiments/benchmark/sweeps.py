"""One size of the layer at a time grows, all else equal; all points are timed in the same turns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from experiments.benchmark.layers import AUTO, DENSE, Layer, Tokens
from experiments.benchmark.peers import HF_EAGER, HF_GROUPED
from experiments.benchmark.plot import Plot
from experiments.benchmark.report import duration, ratio, table, times
from experiments.benchmark.session import Session
from experiments.benchmark.shapes import Shape
from experiments.benchmark.timing import Timed, Timing

EXPERTS = Shape(8192, 256, 256, 8, 2, "fp32")
TOKENS = Shape(4096, 256, 256, 8, 2, "fp32")

MOST_GROWTH = 2.0
"""Time at 256 experts over that at 8, for the same work."""

MOST_EXPERTS_OF_EAGER = 64
"""Its backward pass makes a gradient as large as all experts for each of them: 25 seconds at 256."""


def run_experts(session: Session) -> None:
    points = {f"E {e}": replace(EXPERTS, num_experts=e) for e in (8, 16, 32, 64, 128, 256)}
    timings = _sweep(session, "experts", points, "number of experts", "num_experts")
    pair = (f"{AUTO} E 256", f"{AUTO} E 8")
    claim = "time at 256 experts / at 8"
    session.promise_ratio("experts", "", claim, MOST_GROWTH, timings, pair)


def run_tokens(session: Session) -> None:
    points = {f"T {t}": replace(TOKENS, num_tokens=t) for t in (256, 1024, 4096, 16384)}
    _sweep(session, "tokens", points, "number of tokens", "num_tokens")


def run_width(session: Session) -> None:
    points = {f"F {f}": replace(TOKENS, d_ff=f) for f in (64, 128, 256, 512, 1024)}
    _sweep(session, "width", points, "width of one expert", "d_ff")


def _sweep(
    session: Session, suite: str, points: Mapping[str, Shape], x_label: str, axis: str
) -> dict[str, Timing]:
    """Times, shows and plots; the timings are under `layer point`."""
    session.say(f"{next(iter(points.values()))} and on, forward and backward, median")
    layers: dict[str, list[Layer]] = {}
    candidates: dict[str, Timed] = {}
    for point, shape in points.items():
        layers[point], tokens = _point(session, shape)
        for layer in layers[point]:
            timed = layer.training_pass(tokens)
            candidates[f"{layer.name} {point}"] = timed
    timings = session.time(candidates)
    for point, shape in points.items():
        session.keep(suite, point, shape, layers[point], timings, label=f" {point}")
    names = list(dict.fromkeys(layer.name for point in points for layer in layers[point]))
    _show(session, names, list(points), timings)
    session.plots[suite] = Plot(
        title=f"Forward and backward pass, by {x_label}",
        x_label=x_label,
        y_label="milliseconds",
        series={
            name: [
                (getattr(shape, axis), 1000 * timings[f"{name} {point}"].median)
                for point, shape in points.items()
                if f"{name} {point}" in timings
            ]
            for name in names
        },
    )
    return timings


def _point(session: Session, shape: Shape) -> tuple[list[Layer], Tokens]:
    few = shape.num_experts <= MOST_EXPERTS_OF_EAGER
    peers = (HF_EAGER, HF_GROUPED) if few else (HF_GROUPED,)
    case = session.case(shape)
    layers = session.layers(case, peers)
    for layer in layers:
        if not layer.is_comparable:
            session.say(f"  {layer.name} {layer.computes} at {shape}")
    return layers, case.tokens


def _show(
    session: Session, names: list[str], points: list[str], timings: Mapping[str, Timing]
) -> None:
    def cells(name: str) -> list[str]:
        medians = [timings.get(f"{name} {point}") for point in points]
        shown = ["-" if timing is None else duration(timing.median) for timing in medians]
        return [name, *shown, times(ratio(timings, f"{name} {points[-1]}", f"{name} {points[0]}"))]

    tax = [times(ratio(timings, f"{AUTO} {point}", f"{DENSE} {point}")) for point in points]
    rows = [*(cells(name) for name in names), [f"{AUTO} / {DENSE}", *tax, ""]]
    session.say(table(["layer", *points, "last / first"], rows))
