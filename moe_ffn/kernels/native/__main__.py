"""`python -m moe_ffn.kernels.native` compiles the kernels, so that the first run need not.

With `--tune`, it measures other sizes on this CPU, and writes the best ones to a file that later runs read.
With `--ship`, it compiles them for all x86-64 CPUs into the package, before a wheel is made.
T tokens, D model width, F expert width, E experts, K experts per token, H rows of the first matrix (2 F)
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from subprocess import CalledProcessError

import torch

from moe_ffn.config.files import read_object, write_atomically
from moe_ffn.kernels import cpu
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.kernels.native import build
from moe_ffn.kernels.native.build import Kind
from moe_ffn.kernels.routing import sort_by_expert
from moe_ffn.outputs import Plan

LAYERS = ((2048, 1024, 1024, 8, 2), (2048, 256, 64, 128, 8), (512, 512, 512, 8, 2))
"""T, D, F, E, K of the layers to time, in float32."""

CANDIDATES: Sequence[Sequence[dict[str, int]]] = (
    ({"onednn": 0, "panel": 256, "tile": 128},),
    ({"panel": 16}, {"panel": 32}, {"panel": 64}),
    ({"tile": 64}, {"tile": 96}, {"tile": 128}),
    ({"copied_rows": 64}, {"copied_rows": 256}),
    ({"row_cost": 1}, {"row_cost": 2}, {"row_cost": 4}),
)
"""Changes of a row that are compared at a time."""

ROUNDS = 9
NOISE = 0.02
"""Share of the time that a change must save."""


def tune(row: Kind) -> Kind:
    """Return the fastest row; print the time of each candidate."""
    for changes in CANDIDATES:
        others = [other for change in changes if (other := replace(row, **change)) != row]
        seconds = measure([row, *others])
        for other, time_ in zip(others, seconds[1:], strict=True):
            changed = {k: v for k, v in vars(other).items() if v != vars(row)[k]}
            print(f"{changed}: {time_ / seconds[0]:.3f} of the time", flush=True)
        best = min(range(len(seconds)), key=seconds.__getitem__)
        if seconds[best] < (1 - NOISE) * seconds[0]:
            row = others[best - 1]
    return row


def measure(rows: Sequence[Kind]) -> list[float]:
    """Return the seconds of each row: medians of forward and backward, and their mean over all layers."""
    passes = [cpu.compiled(operators) for operators in map(build.load_sizes, rows)]
    logs = [0.0] * len(rows)
    for shape in LAYERS:
        step = _layer(*shape)
        seconds: list[list[float]] = [[] for _ in rows]
        for _ in range(ROUNDS):
            for implementation, times in zip(passes, seconds, strict=True):
                start = time.perf_counter()
                step(implementation)
                times.append(time.perf_counter() - start)
        for i, times in enumerate(seconds):
            logs[i] += math.log(statistics.median(times))
    return [math.exp(log / len(LAYERS)) for log in logs]


def _layer(T: int, D: int, F: int, E: int, K: int) -> Callable[[cpu.Implementation], None]:
    """Return a function that trains a layer of random gated experts and plan."""
    generator = torch.Generator().manual_seed(0)

    def leaf(*shape: int) -> torch.Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).requires_grad_()

    ids_N = torch.rand(T, E, generator=generator).topk(K).indices.flatten()
    order_N, offsets_E = sort_by_expert(ids_N, E)
    plan = Plan(order_N // K, torch.full((T * K,), 1 / K), offsets_E, order_N)
    weights = ExpertWeights("silu", leaf(E, 2 * F, D), leaf(E, D, F), gated=True)
    x_TD, grad_TD = leaf(T, D), leaf(T, D).detach()
    leaves = [x_TD, weights.up_EHD, weights.down_EDF]

    def step(implementation: cpu.Implementation) -> None:
        torch.autograd.grad(cpu.run(implementation, x_TD, plan, weights), leaves, grad_TD)

    return step


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m moe_ffn.kernels.native", description=__doc__)
    parser.add_argument(
        "--tune", action="store_true", help="measure this CPU, in some minutes; use it alone"
    )
    parser.add_argument(
        "--ship", action="store_true", help="compile for a wheel that needs no compiler"
    )
    given = parser.parse_args()
    if (given.tune or given.ship) and not build.find_compiler():
        parser.error(build.NO_COMPILER)
    if given.ship:
        try:
            print(*build.ship(), sep="\n")
        except (CalledProcessError, OSError, ValueError) as error:
            parser.error(f"the C++ kernel {build.reason_of(error)}")
        return
    reason = build.load()
    print("the CPU kernels are compiled" if reason is None else f"the C++ kernel {reason}")
    if given.tune and reason is None:
        kind, path = build.kind_of_cpu(), build.row_file()
        sizes = vars(tune(build.KINDS[kind]))
        sizes = {
            name: size for name, size in sizes.items() if size != getattr(build.KINDS[kind], name)
        }
        print(f"{kind}: {sizes or 'the sizes of the table are the fastest'}")
        rows = (read_object(path) or {}) | {kind: sizes}
        write_atomically(path, json.dumps(rows))
        print(f"written: {path}; delete it to use the table again")


if __name__ == "__main__":
    main()
