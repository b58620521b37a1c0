"""Time every kernel of a layer with every tile that a kind of GPU might want.

The fastest tiles go into the tables of `moe_ffn.kernels.triton.launch`; nothing is chosen while training.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.outputs import Plan

CANDIDATES: dict[str, list[tuple[int, int, int, int, int]]] = {
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
"""Kernel -> tiles M, O, K, stages, warps, for bfloat16."""

SMALLEST = [(16, 16, 16, 1, 1)]
"""For Triton's interpreter."""

Launch = tuple[str, str, Callable[[], object]]
"""Kernel, its tile, and a function that launches it again on the same tensors."""


def launches(
    x_TD: Tensor,
    plan: Plan,
    weights: ExpertWeights,
    tiles: dict[str, tuple[int, int, int, int, int]],
) -> list[Launch]:
    """Run forward and backward with these tiles; return all launches of kernels that have one."""
    from moe_ffn.kernels.triton import backend, launch

    found: list[Launch] = []
    asked: list[str] = []

    def tile(_: launch.Rows, kernel: str) -> launch.Tile:
        asked.append(kernel)
        return launch.Tile(*tiles[kernel])

    class Recorded:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: Any) -> Callable[..., object]:
            def run(*given: Any, **named: Any) -> None:
                # Both products have a kernel's name: the first is of the experts' outputs.
                name, again = asked[-1], lambda: self.kernel[grid](*given, **named)
                again()
                found.append((name, ", ".join(map(str, tiles[name])), again))

            return run

    names = (
        "_hidden_kernel",
        "_hidden_gradient_kernel",
        "_product_kernel",
        "_weight_gradient_kernel",
    )
    patches = [patch.object(launch, name, Recorded(getattr(launch, name))) for name in names]
    with patch.object(launch.Rows, "tile", tile):
        for one in patches:
            one.start()
        try:
            y_TD = backend.triton(x_TD, plan, weights)
            leaves = [x_TD, plan.weights_N, weights.up_EHD, weights.down_EDF]
            torch.autograd.grad(y_TD, leaves, torch.randn_like(y_TD))
        finally:
            for one in patches:
                one.stop()
    return found


def time_tiles(
    x_TD: Tensor,
    plan: Plan,
    weights: ExpertWeights,
    seconds_of: Callable[[Callable[[], object]], float],
    candidates: Mapping[str, Sequence[tuple[int, int, int, int, int]]],
) -> list[list[object]]:
    """Return rows of kernel, tile, milliseconds and TFLOP/s; the fastest tile of each kernel comes first."""
    pairs, (_, width, d_model) = plan.token_indices_N.shape[0], weights.up_EHD.shape
    first, second = (2 * pairs * d_model * size for size in (width, weights.d_ff))
    times: dict[tuple[str, float], dict[str, float]] = {}
    for index in range(max(map(len, candidates.values()))):
        tiles = {
            name: options[min(index, len(options) - 1)] for name, options in candidates.items()
        }
        products = iter(("product, down", "product, to tokens"))
        for kernel, tile, run in launches(x_TD, plan, weights, tiles):
            name = next(products) if kernel == "product" else kernel
            is_first = name in ("hidden", "up_gradient", "product, to tokens")
            known = times.setdefault((name, first if is_first else second), {})
            known[tile] = known[tile] if tile in known else seconds_of(run)
    return [
        [name, tile, f"{seconds * 1e3:.3f}", f"{flops / seconds / 1e12:.3g}"]
        for (name, flops), known in times.items()
        for tile, seconds in sorted(known.items(), key=lambda item: item[1])
    ]
