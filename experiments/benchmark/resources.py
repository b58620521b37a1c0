"""The suites of what a layer keeps for its backward pass, and of where its time goes."""

from __future__ import annotations

import os

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity
from torch.profiler import profile as profiler

from experiments.benchmark.layers import AUTO, DENSE, Layer, Tokens, dense_layer, moe_layer
from experiments.benchmark.peers import HF_EAGER, HF_GROUPED
from experiments.benchmark.session import Session, duration, ratio, times
from experiments.benchmark.shapes import Shape
from experiments.benchmark.timing import Timing

WIDE, NARROW = Shape(2048, 512, 512, 8, 2, "fp32"), Shape(4096, 256, 128, 32, 4, "fp32")
WIDE_BF16 = Shape(2048, 512, 512, 8, 2, "bf16")

MAX_KEPT = 0.5
"""Of what the more frugal of Hugging Face's two keeps."""

WARMUP, STEPS = 2, 5
"""Of the profile."""

NUM_SHOWN = 14
"""Operators, those of most time."""


def memory(session: Session) -> None:
    for number, shape in enumerate((WIDE, NARROW, WIDE_BF16)):
        if number:
            session.say()
        session.say(f"{shape}, kept for the backward pass")
        case = session.case(shape)
        layers = session.layers(case, (HF_EAGER, HF_GROUPED))
        kept = {
            layer.name: Timing((saved_bytes(layer.module, case.tokens.x_BSD),)) for layer in layers
        }
        rows = [
            [
                layer.name,
                f"{kept[layer.name].median / 2**20:.1f}",
                times(ratio(kept, layer.name, DENSE)),
                layer.computes,
            ]
            for layer in layers
        ]
        session.table(["layer", "MiB", f"/ {DENSE}", "computes"], rows)
        session.keep("memory", str(shape), shape, layers, kept, unit="B")
        peers = [name for name in (HF_EAGER, HF_GROUPED) if name in kept]
        frugal = min(peers, key=lambda name: kept[name].median, default=HF_GROUPED)
        session.promise(
            *("memory", str(shape), "bytes / those of HF eager or grouped_mm"),
            *(MAX_KEPT, kept, (AUTO, frugal)),
            anywhere=True,
            reason="" if peers else "no transformers here",
        )


def saved_bytes(module: nn.Module, x: Tensor) -> int:
    """Bytes of the storages that autograd holds for backward once the forward pass is over.

    Each counts once; parameters and the input are there anyway and do not count. Counted by the hooks that
    autograd calls on every tensor it saves: what a function keeps by other means is not seen.
    """
    uncounted = {_address(tensor) for tensor in (x, *module.parameters())}
    # The tensors themselves are held, so that no address is given out a second time.
    saved: dict[int, Tensor] = {}

    def pack(tensor: Tensor) -> Tensor:
        saved.setdefault(_address(tensor), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        module(x)
    return sum(
        tensor.untyped_storage().nbytes()
        for address, tensor in saved.items()
        if address not in uncounted
    )


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def profile(session: Session) -> None:
    if session.device.type != "cpu":
        session.say(f"not watched: operators return before {session.device.type} is done with them")
        return
    # Otherwise the profiler announces itself, line by line.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    for number, shape in enumerate((WIDE, NARROW)):
        if number:
            session.say()
        session.say(f"{shape}, forward and backward, time inside each operator of one step")
        torch.manual_seed(0)
        tokens = Tokens.of(shape, session.device)
        dense = seconds_by_operator(dense_layer(shape, session.device), tokens)
        block = moe_layer(shape, "auto", session.device)
        moe = seconds_by_operator(Layer(AUTO, block), tokens)
        whole = sum(seconds for seconds, _ in dense.values())
        names = sorted(moe, key=lambda name: -moe[name][0])[:NUM_SHOWN]
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
        session.table(headers, rows)


def seconds_by_operator(layer: Layer, tokens: Tokens) -> dict[str, tuple[float, float]]:
    """Operator -> its own seconds in one step, without what it calls, and its calls.

    Watching takes time too, most of it where operators are many and short.
    """
    step = layer.training_pass(tokens)

    def run(times: int) -> None:
        for _ in range(times):
            step.run()
            step.reset()

    run(WARMUP)
    with profiler(activities=[ProfilerActivity.CPU]) as watched:
        run(STEPS)
    return {
        event.key: (event.self_cpu_time_total / STEPS / 1e6, event.count / STEPS)
        for event in watched.key_averages()
    }
