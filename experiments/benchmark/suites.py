"""The suites that time the layer: at published sizes, in sweeps, by load, decoding, plain, on a GPU.

The Mixture-of-Experts tax is the time of the whole layer (router, plan, experts, combine; gradients to x
and all parameters) over that of the dense block whose width one token passes through, K * F.

T tokens, D model width, E experts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmark.layers import (
    AUTO,
    DENSE,
    Case,
    Layer,
    PlainSwiGLU,
    Tokens,
    dtype_of,
    moe_layer,
    our_layers,
    same_rows,
)
from experiments.benchmark.peers import (
    HF_BATCHED,
    HF_EAGER,
    HF_GROUPED,
    SCATTERMOE,
    TRAINING_PEERS,
)
from experiments.benchmark.session import (
    Point,
    Session,
    chart,
    duration,
    ratio,
    spread,
    times,
)
from experiments.benchmark.shapes import Shape
from experiments.benchmark.timing import Timed, Timing
from moe_ffn import build_ffn
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing import TopKRouterConfig
from moe_ffn.routing.base import LinearRouter, routing_of_pairs

# ------------------------------------------------------------------ one shape after the other

PROMISED = {
    Shape(2048, 512, 512, 8, 2, "fp32"): (1.2, 1.2),
    Shape(2048, 512, 512, 8, 2, "bf16"): (1.7, 1.5),
    Shape(4096, 256, 128, 32, 4, "fp32"): (1.4, 1.5),
    Shape(4096, 256, 128, 32, 4, "bf16"): (2.6, 1.5),
    Shape(2048, 1024, 1024, 8, 2, "fp32"): (1.1, None),
    Shape(4096, 1024, 1024, 8, 2, "bf16"): (1.3, None),
}
"""Shape -> the largest tax promised, and how many times faster than Hugging Face's grouped_mm."""

TAX_GOAL = 1.1
"""The tax to reach everywhere, in the end."""


def time_shapes(session: Session, suite: str, shapes: Sequence[Shape]) -> None:
    taxes: dict[str, list[tuple[float, float]]] = {}
    for number, shape in enumerate(shapes, start=1):
        if number > 1:
            session.say()
        layers, timings = _time_shape(session, suite, shape)
        _show(session, layers, timings, (DENSE, HF_GROUPED))
        limit, faster = PROMISED.get(shape, (None, None))
        if limit is None or not session.limits_apply:
            session.say(f"  tax {times(ratio(timings, AUTO, DENSE))}, goal {TAX_GOAL:g}")
        else:
            pair = (AUTO, DENSE)
            session.promise(suite, str(shape), "tax", limit, timings, pair, goal=TAX_GOAL)
        if faster is not None:
            claim, pair = f"times faster than {HF_GROUPED}", (HF_GROUPED, AUTO)
            session.promise(suite, str(shape), claim, faster, timings, pair, at_most=False)
        for layer in layers:
            tax = ratio(timings, layer.name, DENSE)
            if tax is not None:
                taxes.setdefault(layer.name, []).append((number, tax))
    session.charts[suite] = chart(
        "Forward and backward pass beside the dense block's",
        "tokens, model width, expert width; experts, experts per token, dtype",
        "time / that of the dense block",
        taxes,
        x_names=[
            f"{s.num_tokens}, {s.d_model}, {s.d_ff}<br>{s.num_experts}, {s.k}, {s.dtype}"
            for s in shapes
        ],
    )


def _time_shape(
    session: Session, suite: str, shape: Shape, beside: Mapping[str, Timed] | None = None
) -> tuple[list[Layer], dict[str, Timing]]:
    session.say(f"{shape}, forward and backward")
    case = session.case(shape)
    layers = session.layers(case, TRAINING_PEERS)
    passes = [layer.training_pass(case.tokens) for layer in layers]
    point = Point(str(shape), shape, layers, passes)
    return layers, session.time_points(suite, [point], beside=beside)


def _show(
    session: Session,
    layers: Sequence[Layer],
    timings: Mapping[str, Timing],
    against: Sequence[str],
) -> None:
    """A table of one case, with a column of ratios for each name in `against` that was timed."""
    columns = [name for name in against if name in timings]
    rows = [
        [
            layer.name,
            duration(timings[layer.name].median),
            spread(timings[layer.name]),
            *(times(ratio(timings, layer.name, to)) for to in columns),
            layer.computes,
        ]
        for layer in layers
    ]
    session.table(
        ["layer", "median", "quartiles", *(f"/ {name}" for name in columns), "computes"], rows
    )


def rows(session: Session) -> None:
    time_shapes(session, "rows", list(PROMISED))


# ------------------------------------ one size grows; all points are timed in the same turns

MAX_GROWTH = 2.0
"""Time at 256 experts over that at 8, for the same work."""

MAX_EXPERTS_OF_EAGER = 64
"""Its backward pass makes a gradient as large as all experts for each of them: 25 seconds at 256."""

SWEPT = Shape(4096, 256, 256, 8, 2, "fp32")


def experts(session: Session) -> None:
    base = replace(SWEPT, num_tokens=8192)
    shapes = {e: replace(base, num_experts=e) for e in (8, 16, 32, 64, 128, 256)}
    timings = _sweep(session, "experts", "E", shapes, "number of experts")
    pair = (f"{AUTO} E 256", f"{AUTO} E 8")
    claim = "time at 256 experts / at 8"
    session.promise("experts", "", claim, MAX_GROWTH, timings, pair)


def tokens(session: Session) -> None:
    shapes = {t: replace(SWEPT, num_tokens=t) for t in (256, 1024, 4096, 16384)}
    _sweep(session, "tokens", "T", shapes, "number of tokens")


def width(session: Session) -> None:
    shapes = {f: replace(SWEPT, d_ff=f) for f in (64, 128, 256, 512, 1024)}
    _sweep(session, "width", "F", shapes, "width of one expert")


def _sweep(
    session: Session, suite: str, letter: str, shapes: Mapping[int, Shape], x_label: str
) -> dict[str, Timing]:
    session.say(f"{next(iter(shapes.values()))} and on, forward and backward, median")
    points: dict[int, Point] = {}
    for x, shape in shapes.items():
        few = shape.num_experts <= MAX_EXPERTS_OF_EAGER
        case = session.case(shape)
        layers = session.layers(case, (HF_EAGER, HF_GROUPED) if few else (HF_GROUPED,))
        for layer in layers:
            if not layer.is_comparable:
                session.say(f"  {layer.name} {layer.computes} at {shape}")
        passes = [layer.training_pass(case.tokens) for layer in layers]
        points[x] = Point(f"{letter} {x}", shape, layers, passes, f" {letter} {x}")
    title = f"Forward and backward pass, by {x_label}"
    timings, rows = _time_grid(session, suite, points, title, x_label, "milliseconds", 1e3)
    labels = [point.label for point in points.values()]
    for row in rows:
        row.append(times(ratio(timings, row[0] + labels[-1], row[0] + labels[0])))
    tax = [times(ratio(timings, AUTO + label, DENSE + label)) for label in labels]
    rows.append([f"{AUTO} / {DENSE}", *tax, ""])
    session.table(["layer", *(point.case for point in points.values()), "last / first"], rows)
    return timings


def _time_grid(
    session: Session,
    suite: str,
    points: Mapping[int, Point],
    title: str,
    x_label: str,
    y_label: str,
    scale: float,
) -> tuple[dict[str, Timing], list[list[str]]]:
    """The timings, charted over x, and rows of a table: each layer with its median at every point."""
    timings = session.time_points(suite, list(points.values()))
    names = dict.fromkeys(layer.name for point in points.values() for layer in point.layers)
    found = {
        name: {x: timings.get(name + point.label) for x, point in points.items()} for name in names
    }
    series = {
        name: [(x, scale * timing.median) for x, timing in line.items() if timing is not None]
        for name, line in found.items()
    }
    session.charts[suite] = chart(title, x_label, y_label, series)
    rows = [
        [name, *("-" if timing is None else duration(timing.median) for timing in line.values())]
        for name, line in found.items()
    ]
    return timings, rows


NUM_CALLS = 20
"""Of decoding, in a row on the clock; one takes a fraction of a millisecond."""


def decoding(session: Session) -> None:
    base = Shape(1, 512, 512, 8, 2, "fp32")
    session.say(f"{base} and on, forward alone, evaluation mode, median of one call")
    points: dict[int, Point] = {}
    for num_tokens in (1, 2, 4, 8, 16):
        case, label = session.case(replace(base, num_tokens=num_tokens)), f"T {num_tokens}"
        sparse = session.sparse_layers(case, (HF_EAGER, HF_GROUPED, HF_BATCHED))
        layers = [as_decoding(layer, case) for layer in sparse]
        x_BSD = case.tokens.x_BSD.detach()
        passes = [layer.decoding_pass(x_BSD, NUM_CALLS) for layer in layers]
        points[num_tokens] = Point(label, case.shape, layers, passes, f" {label}", to=AUTO)
    title = "Forward pass of a few tokens, without gradients"
    timings, rows = _time_grid(
        session, "decoding", points, title, "number of tokens", "microseconds", 1e6
    )
    cases = [point.case for point in points.values()]
    session.table(["layer", *cases], rows)
    for case in cases:
        for peer in (HF_EAGER, HF_BATCHED):
            pair = (f"{AUTO} {case}", f"{peer} {case}")
            session.promise("decoding", "", f"time / {peer}, {case}", 1.0, timings, pair)


def as_decoding(layer: Layer, case: Case) -> Layer:
    """The layer in evaluation mode, with what it computes there: without gradients it may go another way."""
    layer.module.eval()
    x_BSD = case.tokens.x_BSD.detach()
    with torch.no_grad():
        wanted_TD = case.source.eval()(x_BSD).hidden.flatten(0, -2)
        found_TD = layer(x_BSD).flatten(0, -2)
    if layer.is_comparable and not same_rows(found_TD, wanted_TD).all():
        return replace(layer, computes="DIFFERS without gradients")
    return layer


# ---------------------------------------------------------------------------------------- skew

SKEWED = Shape(8192, 256, 512, 8, 1, "fp32")
"""k = 1, so that one expert can have all tokens."""

LOADS = {
    "balanced": [1.0] * SKEWED.num_experts,
    "zipf": [1 / rank for rank in range(1, SKEWED.num_experts + 1)],
    "one hot": [1.0] + [0.0] * (SKEWED.num_experts - 1),
}
"""Name -> how much of the tokens each expert gets, in proportion."""


class LoadRouter(LinearRouter):
    """Sends given shares of the tokens to the experts, in a random order; weights are learned as ever."""

    def __init__(self, shape: Shape, shares_E: Sequence[float]) -> None:
        super().__init__(TopKRouterConfig(k=1), shape.d_model, shape.num_experts)
        generator = torch.Generator().manual_seed(2)
        ends_E = torch.tensor(shares_E).cumsum(0) / sum(shares_E)
        places_T = (torch.randperm(shape.num_tokens, generator=generator) + 0.5) / shape.num_tokens
        expert_ids_T = torch.searchsorted(ends_E, places_T).clamp(max=shape.num_experts - 1)
        self.register_buffer("expert_ids_TK", expert_ids_T.unsqueeze(-1), persistent=False)

    expert_ids_TK: Tensor

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        logits_TE = self.logits(x_TD)
        scores_TE = logits_TE.softmax(dim=-1)
        weights_TK = scores_TE.gather(-1, self.expert_ids_TK)
        return routing_of_pairs(weights_TK, self.expert_ids_TK, logits_TE, scores_TE, context)


def skew(session: Session) -> None:
    session.say(f"{SKEWED}, tokens spread in three ways, forward and backward")
    torch.manual_seed(0)
    points: list[Point] = []
    for load, shares_E in LOADS.items():
        source = moe_layer(SKEWED, "loop", session.device)
        source.router = LoadRouter(SKEWED, shares_E).to(session.device)
        case = Case.of(SKEWED, source, session.device)
        layers = our_layers(case, session.backends, session.skip)
        passes = [layer.training_pass(case.tokens) for layer in layers]
        points.append(Point(load, SKEWED, layers, passes, f" {load}", to=AUTO))
    timings = session.time_points("skew", points)
    rows = [
        [
            layer.name,
            point.case,
            duration(timings[layer.name + point.label].median),
            spread(timings[layer.name + point.label]),
            times(ratio(timings, layer.name + point.label, f"{layer.name} balanced")),
            layer.computes,
        ]
        for point in points
        for layer in point.layers
    ]
    headers = ["layer", "load", "median", "quartiles", "/ balanced", "computes"]
    session.table(headers, sorted(rows, key=lambda row: row[0]))
    pair = (f"{AUTO} one hot", f"{AUTO} balanced")
    session.promise("skew", "", "time on one expert / balanced", 1.0, timings, pair)


# ---------------------------------------------------------------------------------------- blocks

PLAIN = Shape(2048, 256, 1024, 1, 1, "fp32")

MAX_RATIO_TO_PLAIN = 1.03
"""What the machine's noise leaves of a ratio of 1."""


class PlainDense(nn.Module):
    """down(gelu(up x))."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


def blocks(session: Session) -> None:
    """The dense blocks beside the same composition written out by hand: the interface must cost nothing."""
    session.say(
        f"T {PLAIN.num_tokens}, D {PLAIN.d_model}, d_ff {PLAIN.d_ff}, fp32, forward and backward"
    )
    torch.manual_seed(0)
    tokens = Tokens.of(PLAIN, session.device)
    points: list[Point] = []
    for name, module in {"dense": PlainDense, "swiglu": PlainSwiGLU}.items():
        by_hand = module(PLAIN.d_model, PLAIN.d_ff).to(session.device)
        block = build_ffn({"type": name, "d_ff": PLAIN.d_ff}, d_model=PLAIN.d_model)
        block.to(session.device).load_state_dict(by_hand.state_dict())
        layers = [Layer(f"plain {name}", by_hand), Layer(f"moe_ffn {name}", block)]
        passes = [layer.training_pass(tokens) for layer in layers]
        points.append(Point(name, PLAIN, layers, passes, to=f"plain {name}"))
    timings = session.time_points("blocks", points, more=5)
    for number, point in enumerate(points):
        if number:
            session.say()
        _show(session, point.layers, timings, (point.to,))
        claim, pair = f"time / {point.to}", (f"moe_ffn {point.case}", point.to)
        session.promise("blocks", point.case, claim, MAX_RATIO_TO_PLAIN, timings, pair)


# ----------------------------------------------------------------------------------------- gpu

LARGE = Shape(32768, 2048, 1024, 64, 8, "bf16")
PRODUCT = "one dense product"
SHARE_GOAL = 0.8
GPU_PROMISES = (
    ("rate / that of one dense product", 0.6, SHARE_GOAL, PRODUCT),
    (f"times faster than {HF_GROUPED}", 1.0, None, HF_GROUPED),
    (f"times faster than {SCATTERMOE}", 1.0, None, SCATTERMOE),
)
"""Claim, lower limit, goal, and the timing that ours is divided into."""


def gpu(session: Session) -> None:
    """The layer at the size of a large model, as a share of the rate that one dense product reaches."""
    on_gpu = session.device.type == "cuda"
    timings: dict[str, Timing] = {}
    if on_gpu:
        # As many multiplications as the experts' products have, in a single matrix product.
        place: dict[str, Any] = {"device": session.device, "dtype": dtype_of(LARGE)}
        x_ND = torch.randn(LARGE.num_tokens * LARGE.k, LARGE.d_model, **place)
        weight_DO = torch.randn(LARGE.d_model, 9 * LARGE.d_ff, **place)
        product = Timed(lambda: x_ND @ weight_DO)
        layers, timings = _time_shape(session, "gpu", LARGE, beside={PRODUCT: product})
        _show(session, layers, timings, (DENSE, HF_GROUPED, SCATTERMOE))
        tera, seconds = LARGE.flops / 1e12, timings[PRODUCT].median
        session.say(
            f"  one dense product of the same work: {duration(seconds)}, "
            f"{tera / seconds:.0f} TFLOP/s; goal {SHARE_GOAL:.0%} of it"
        )
        for layer in layers:
            mine = timings[layer.name].median
            session.say(f"  {layer.name}: {tera / mine:.0f} TFLOP/s, {seconds / mine:.0%}")
    else:
        session.say(f"{LARGE}: not timed, this runs on {session.device.type}")
    reason = "" if on_gpu else "no GPU here"
    for claim, limit, goal, name in GPU_PROMISES:
        session.promise(
            *("gpu", str(LARGE), claim, limit, timings, (name, AUTO)),
            at_most=False,
            goal=goal,
            anywhere=True,
            reason=reason,
        )
