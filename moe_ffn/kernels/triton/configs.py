"""The tile sizes that each kernel chooses from, at its first call with a pair of widths and a dtype.

M rows of a tile, O columns, K what is multiplied away at a time

The lists are short, for every member is compiled and timed once; they hold what fits into a Hopper
multiprocessor (228 KB of shared memory, 64 K registers) without spilling. A test compiles them all.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from triton import knobs

GROUP = 8
"""Slots of rows that go over the columns together, see `tiles.slot_and_column`."""


def _config(
    block_m: int, block_o: int, block_k: int, stages: int, warps: int, **more: int
) -> triton.Config:
    blocks = {"BLOCK_M": block_m, "BLOCK_O": block_o, "BLOCK_K": block_k, **more}
    return triton.Config(blocks, num_stages=stages, num_warps=warps)


HIDDEN = [
    _config(128, 128, 64, 3, 8, GROUP=GROUP),
    _config(128, 64, 64, 4, 4, GROUP=GROUP),
    _config(64, 64, 64, 4, 4, GROUP=GROUP),
]
HIDDEN_GRADIENT = [
    _config(128, 128, 64, 3, 8, GROUP=GROUP),
    _config(128, 64, 64, 4, 8, GROUP=GROUP),
    _config(64, 64, 64, 4, 4, GROUP=GROUP),
]
PRODUCT = [
    _config(128, 256, 64, 3, 8, GROUP=GROUP),
    _config(128, 128, 64, 4, 8, GROUP=GROUP),
    _config(64, 128, 64, 4, 4, GROUP=GROUP),
]
WEIGHT_GRADIENT = [
    _config(128, 256, 64, 3, 8),
    _config(128, 128, 64, 4, 8),
    _config(128, 64, 64, 4, 4),
]


def float32(**more: int) -> triton.Config:
    """One for all kernels.

    The tiles above take twice the shared memory in float32, and the many multiplications of full
    precision take long to compile.
    """
    return _config(64, 64, 32, 3, 4, **more)


INTERPRETED = (16, 16, 16, 1, 1)
"""Under the interpreter: the smallest, so that tests of small layers have several tiles."""

MIN_BLOCK_O = INTERPRETED[1] if knobs.runtime.interpret else 64
"""No kernel's tiles are narrower."""


def tuned(
    kernel: Any, configs: list[triton.Config], key: list[str], reset: list[str] | None = None
) -> Any:
    """`kernel` with the best of `configs`, chosen anew where one of `key` or a dtype changes.

    The number of pairs is not in the key: it changes at every step.
    """
    groups = "GROUP" in configs[0].kwargs
    if knobs.runtime.interpret:
        configs = [_config(*INTERPRETED, **({"GROUP": 2} if groups else {}))]
        return triton.autotune(configs, key=key)(kernel)
    wide = float32(**({"GROUP": GROUP} if groups else {}))

    def for_dtype(
        configs: list[triton.Config], arguments: dict[str, Any], **_: Any
    ) -> list[triton.Config]:
        first = next(iter(arguments.values()))
        return [c for c in configs if (c is wide) == (first.dtype == torch.float32)]

    return triton.autotune(
        [*configs, wide],
        key=key,
        reset_to_zero=reset,
        prune_configs_by={"early_config_prune": for_dtype},
    )(kernel)
