"""Where the time of a layer goes, operator by operator, beside the dense block's."""

from __future__ import annotations

import os

import torch
from torch.profiler import ProfilerActivity, profile

from experiments.benchmark.layers import AUTO, DENSE, Layer, Tokens, dense_layer, moe_layer, ours
from experiments.benchmark.report import duration, table
from experiments.benchmark.session import Session
from experiments.benchmark.shapes import Shape

SHAPES = (Shape(2048, 512, 512, 8, 2, "fp32"), Shape(4096, 256, 128, 32, 4, "fp32"))

WARMUP, STEPS = 2, 5

SHOWN = 14
"""Operators, those of most time."""


def run(session: Session) -> None:
    if session.device.type != "cpu":
        session.say(f"not watched: operators return before {session.device.type} is done with them")
        return
    os.environ.setdefault(
        "KINETO_LOG_LEVEL", "99"
    )  # or the profiler announces itself, line by line
    for number, shape in enumerate(SHAPES):
        if number:
            session.say()
        session.say(f"{shape}, forward and backward, time inside each operator of one step")
        torch.manual_seed(0)
        tokens = Tokens.of(shape, session.device)
        layers = [
            dense_layer(shape, session.device),
            Layer(ours("auto"), moe_layer(shape, "auto", session.device)),
        ]
        times = {layer.name: seconds_by_operator(layer, tokens) for layer in layers}
        moe, dense = times[AUTO], times[DENSE]
        whole = sum(seconds for seconds, _ in dense.values())
        names = sorted(moe, key=lambda name: -moe[name][0])[:SHOWN]
        rows = [
            [
                name,
                f"{moe[name][1]:.0f}",
                duration(moe[name][0]),
                f"{moe[name][0] / whole:.2f}",
                f"{dense.get(name, (0.0, 0.0))[0] / whole:.2f}",
            ]
            for name in names
        ]
        others = sum(seconds for name, (seconds, _) in moe.items() if name not in names)
        rows.append(["the others", "", duration(others), f"{others / whole:.2f}", ""])
        headers = ["operator", "calls", AUTO, f"/ all of {DENSE}", f"{DENSE} / all of it"]
        session.say(table(headers, rows))


def seconds_by_operator(layer: Layer, tokens: Tokens) -> dict[str, tuple[float, float]]:
    """Operator -> its own seconds in one step, without what it calls, and its calls.

    Watching takes time too, most of it where operators are many and short.
    """
    step = layer.training_pass(tokens)
    for _ in range(WARMUP):
        step.run()
        step.reset()
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        for _ in range(STEPS):
            step.run()
            step.reset()
    return {
        event.key: (event.self_cpu_time_total / STEPS / 1e6, event.count / STEPS)
        for event in watched.key_averages()
    }
