"""The layer at the size of a large model, on a GPU: as a share of what one dense product reaches."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from experiments.benchmark.layers import AUTO, DENSE, dtype_of
from experiments.benchmark.peers import HF_GROUPED, SCATTERMOE
from experiments.benchmark.report import Promise, duration
from experiments.benchmark.rows import time_layer
from experiments.benchmark.session import Session
from experiments.benchmark.shapes import Shape
from experiments.benchmark.timing import Timed, Timing

SHAPE = Shape(32768, 2048, 1024, 64, 8, "bf16")

PRODUCT = "one dense product"

LEAST_SHARE = 0.6
GOAL = 0.8
RATE = "rate / that of one dense product"


def run(session: Session) -> None:
    if session.device.type != "cuda":
        session.say(f"{SHAPE}: not timed, this runs on {session.device.type}")
        promise(session, {}, "no GPU here")
        return
    layers, timings = time_layer(session, SHAPE, beside={PRODUCT: one_product(session.device)})
    product = timings[PRODUCT]
    session.show(layers, timings, (DENSE, HF_GROUPED, SCATTERMOE))
    session.keep("gpu", str(SHAPE), SHAPE, layers, timings)
    tera = SHAPE.flops / 1e12
    session.say(
        f"  one dense product of the same work: {duration(product.median)}, "
        f"{tera / product.median:.0f} TFLOP/s; goal {GOAL:.0%} of it"
    )
    for layer in layers:
        share = product.median / timings[layer.name].median
        rate = tera / timings[layer.name].median
        session.say(f"  {layer.name}: {rate:.0f} TFLOP/s, {share:.0%}")
    promise(session, timings)


def promise(session: Session, timings: Mapping[str, Timing], reason: str = "") -> None:
    """What is promised of a GPU; all of it is named where there is none."""
    claims = [
        (RATE, LEAST_SHARE, GOAL, PRODUCT),
        (f"times faster than {HF_GROUPED}", 1.0, None, HF_GROUPED),
        (f"times faster than {SCATTERMOE}", 1.0, None, SCATTERMOE),
    ]
    for claim, least, goal, name in claims:
        figure, why = session.comparison(timings, (name, AUTO))
        session.promise(
            Promise("gpu", str(SHAPE), claim, least, figure, False, goal, reason or why)
        )


def one_product(device: torch.device) -> Timed:
    """As many multiplications as the experts' products have, in a single matrix product."""
    pairs = SHAPE.num_tokens * SHAPE.k
    x_ND = torch.randn(pairs, SHAPE.d_model, device=device, dtype=dtype_of(SHAPE))
    weight_DO = torch.randn(SHAPE.d_model, 9 * SHAPE.d_ff, device=device, dtype=dtype_of(SHAPE))
    return Timed(lambda: x_ND @ weight_DO)
