"""One layer at a time, forward and backward, beside the dense block and every other library.

The Mixture-of-Experts tax is the time of the whole layer (router, plan, experts, combine; gradients to x
and all parameters) over that of the dense block whose width one token passes through, K * F.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from experiments.benchmark.layers import AUTO, DENSE, Layer
from experiments.benchmark.peers import HF_GROUPED, TRAINING_PEERS
from experiments.benchmark.plot import Plot
from experiments.benchmark.report import ratio, times
from experiments.benchmark.session import Session
from experiments.benchmark.shapes import Shape
from experiments.benchmark.timing import Timed, Timing

PROMISED = {
    Shape(2048, 512, 512, 8, 2, "fp32"): (1.2, 1.2),
    Shape(2048, 512, 512, 8, 2, "bf16"): (1.7, 1.5),
    Shape(4096, 256, 128, 32, 4, "fp32"): (1.4, 1.5),
    Shape(4096, 256, 128, 32, 4, "bf16"): (2.6, 1.5),
    Shape(2048, 1024, 1024, 8, 2, "fp32"): (1.1, None),
    Shape(4096, 1024, 1024, 8, 2, "bf16"): (1.3, None),
}
"""Shape -> the most the tax may be, and how many times faster than Hugging Face's grouped_mm."""

GOAL = 1.1
"""The tax to reach everywhere, in the end."""


def run(session: Session) -> None:
    run_shapes(session, "rows", list(PROMISED))


def run_shapes(session: Session, suite: str, shapes: Sequence[Shape]) -> None:
    taxes: dict[str, list[tuple[float, float]]] = {}
    for number, shape in enumerate(shapes, start=1):
        if number > 1:
            session.say()
        layers, timings = time_layer(session, shape)
        session.show(layers, timings, (DENSE, HF_GROUPED))
        session.keep(suite, str(shape), shape, layers, timings)
        _promise(session, suite, shape, timings)
        for layer in layers:
            tax = ratio(timings, layer.name, DENSE)
            if tax is not None:
                taxes.setdefault(layer.name, []).append((number, tax))
    session.plots[suite] = Plot(
        title="Forward and backward pass beside the dense block's",
        x_label="tokens, model width, expert width; experts, experts per token, dtype",
        y_label="time / that of the dense block",
        series=taxes,
        x_names=[_two_lines(shape) for shape in shapes],
    )


def time_layer(
    session: Session, shape: Shape, beside: Mapping[str, Timed] | None = None
) -> tuple[list[Layer], dict[str, Timing]]:
    """The candidates of one shape, and their times, and those of what takes turns `beside` them."""
    session.say(f"{shape}, forward and backward")
    case = session.case(shape)
    layers = session.layers(case, TRAINING_PEERS)
    passes = {layer.name: layer.training_pass(case.tokens) for layer in layers}
    timings = session.time({**passes, **(beside or {})})
    return layers, timings


def _two_lines(shape: Shape) -> str:
    tokens = f"{shape.num_tokens}, {shape.d_model}, {shape.d_ff}"
    return f"{tokens}\n{shape.num_experts}, {shape.k}, {shape.dtype}"


def _promise(
    session: Session,
    suite: str,
    shape: Shape,
    timings: dict[str, Timing],
) -> None:
    if shape not in PROMISED or not session.limits_apply:
        session.say(f"  tax {times(ratio(timings, AUTO, DENSE))}, goal {GOAL:g}")
        return
    limit, faster = PROMISED[shape]
    case = str(shape)
    session.promise_ratio(suite, case, "tax", limit, timings, (AUTO, DENSE), goal=GOAL)
    if faster is not None:
        pair = (HF_GROUPED, AUTO)
        claim = f"times faster than {HF_GROUPED}"
        session.promise_ratio(suite, case, claim, faster, timings, pair, at_most=False)
