"""Time every kernel of a layer with every tile that a kind of GPU might want.

The fastest tiles go into the tables of `moe_ffn.kernels.triton.launch`; nothing is chosen while training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.outputs import Plan

Size = tuple[int, int, int, int, int]
"""M, O, K, stages, warps of a tile."""

CANDIDATES: dict[str, list[Size]] = {
    "hidden": [
        *((128, 128, 64, 3, 8), (128, 128, 64, 4, 8), (128, 64, 64, 3, 8), (64, 128, 64, 4, 4)),
        *((64, 64, 64, 4, 4), (16, 64, 128, 3, 4)),
    ],
    "product": [
        *((128, 256, 64, 3, 8), (128, 256, 64, 4, 8), (128, 128, 64, 3, 8), (64, 256, 64, 4, 4)),
        *((64, 128, 64, 4, 4), (16, 64, 128, 3, 4)),
    ],
    "hidden_gradient": [
        *((128, 128, 64, 3, 8), (128, 128, 64, 4, 8), (64, 128, 64, 4, 8), (64, 64, 64, 4, 4)),
    ],
    "up_gradient": [
        *((256, 128, 64, 4, 8), (128, 256, 64, 4, 8), (128, 128, 64, 3, 8), (128, 128, 64, 4, 8)),
    ],
    "down_gradient": [
        *((256, 128, 64, 4, 8), (128, 256, 64, 4, 8), (128, 128, 64, 3, 8), (128, 128, 64, 4, 8)),
    ],
}
"""Kernel -> tiles to try for bfloat16."""


def launches(
    x_TD: Tensor, plan: Plan, weights: ExpertWeights, kernel: str, tile: Size | None
) -> list[Callable[[], object]]:
    """Run forward and backward; return functions that launch one kernel again, on the same tensors.

    That kernel has this tile; all other kernels, or None, have that of `launch.TILES`.
    """
    from moe_ffn.kernels.triton import backend, launch

    found: list[Callable[[], object]] = []
    asked: list[str] = []
    chosen = launch.Rows.tile

    def tile_of(rows: launch.Rows, name: str) -> launch.Tile:
        asked.append(name)
        return chosen(rows, name) if name != kernel or tile is None else launch.Tile(*tile)

    class Recorded:
        def __init__(self, original: Any) -> None:
            self.original = original

        def __getitem__(self, grid: Any) -> Callable[..., object]:
            def run(*given: Any, **named: Any) -> None:
                def again() -> None:
                    self.original[grid](*given, **named)

                again()
                if asked[-1] == kernel:
                    found.append(again)

            return run

    names = ("hidden", "hidden_gradient", "product", "weight_gradient")
    with ExitStack() as patches:
        patches.enter_context(patch.object(launch.Rows, "tile", tile_of))
        for name in names:
            recorded = Recorded(getattr(launch, f"_{name}_kernel"))
            patches.enter_context(patch.object(launch, f"_{name}_kernel", recorded))
        y_TD = backend.triton(x_TD, plan, weights)
        leaves = [x_TD, plan.weights_N, weights.up_EHD, weights.down_EDF]
        torch.autograd.grad(y_TD, leaves, torch.randn_like(y_TD))
    return found


def time_tiles(
    x_TD: Tensor,
    plan: Plan,
    weights: ExpertWeights,
    seconds_of: Callable[[Callable[[], object]], float],
    candidates: Mapping[str, Sequence[Size]],
) -> list[list[object]]:
    """Return rows of kernel, tile, milliseconds and TFLOP/s; a kernel's fastest tile comes first.

    The tile that `launch.TILES` chooses is timed too. A tile that fails has a reason for a time.
    """
    pairs, (_, width, d_model) = plan.token_indices_N.shape[0], weights.up_EHD.shape
    first, second = (2 * pairs * d_model * size for size in (width, weights.d_ff))
    flops = {
        "hidden": [first],
        "product": [second, first],  # down, and the gradient of the tokens
        "hidden_gradient": [second],
        "up_gradient": [first],
        "down_gradient": [second],
    }
    rows: list[list[object]] = []
    for kernel, work in flops.items():
        times: list[tuple[float, list[object]]] = []
        for tile in (None, *candidates.get(kernel, ())):
            label = "as chosen" if tile is None else ", ".join(map(str, tile))
            try:
                found = launches(x_TD, plan, weights, kernel, tile)
                seconds = [seconds_of(run) for run in found]
            except Exception as error:  # such as too little shared memory
                times.append((math.inf, [kernel, label, f"fails: {type(error).__name__}", ""]))
                continue
            rate = sum(work) / sum(seconds) / 1e12
            milliseconds = " and ".join(f"{each * 1e3:.3f}" for each in seconds)
            times.append((sum(seconds), [kernel, label, milliseconds, f"{rate:.3g}"]))
        rows += [row for _, row in sorted(times, key=lambda timed: timed[0])]
    return rows
