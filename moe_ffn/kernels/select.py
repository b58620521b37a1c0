"""Table of backends, and the choice of `auto`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from moe_ffn.kernels import cpu
from moe_ffn.kernels.base import (
    Backend,
    ExpertWeights,
    check_dtype,
    has_no_data,
    is_transform_on,
    reject_vmap,
)
from moe_ffn.kernels.torch_products import grouped_mm, grouped_mm_unsupported_reason, loop
from moe_ffn.kernels.triton import backend as triton
from moe_ffn.outputs import Plan


@dataclass(frozen=True)
class BackendEntry:
    """A backend, and where it runs."""

    run: Backend
    unsupported_reason: Callable[[Tensor, ExpertWeights], str | None] = lambda *_: None
    """Return why the backend cannot run these tokens and weights, or None if it can."""
    device: str | None = None
    """Device type, if the backend supports only one."""
    auto_on: str | None = None
    """Device type on which `auto` chooses the backend, unless an earlier one in the table can run."""


BACKENDS = {
    "loop": BackendEntry(loop),
    "cpu": BackendEntry(cpu.cpu, cpu.unsupported_reason, device="cpu", auto_on="cpu"),
    "triton": BackendEntry(triton.triton, triton.unsupported_reason, device="cuda", auto_on="cuda"),
    "grouped_mm": BackendEntry(grouped_mm, grouped_mm_unsupported_reason, auto_on="cuda"),
}
"""Backends by name; a test compares each with a double loop over tokens and experts."""

BackendName = Literal["auto", "loop", "cpu", "grouped_mm", "triton"]

assert {"auto", *BACKENDS} == {*get_args(BackendName)}


def run_experts(x_TD: Tensor, plan: Plan, weights: ExpertWeights, backend: str) -> Tensor:
    """Run the experts on a plan with a backend of this name, or with the best one for `auto`; return (T, D).

    Raises:
        ValueError: the named backend does not support this device, dtype or width; `x_TD` and the weights
            differ in dtype, without autocast; or a tensor is batched by `torch.func.vmap`.
    """
    check_dtype(x_TD, weights.up_EHD)
    if is_transform_on():
        reject_vmap(x_TD, (plan.weights_N, *weights.parameters))
    if has_no_data(x_TD) and not torch.compiler.is_exporting():
        return cpu.run_operator(x_TD, plan, weights)  # all backends have equal output shapes
    if backend == "auto":
        backend = best_backend(x_TD, plan, weights)
    elif (reason := BACKENDS[backend].unsupported_reason(x_TD, weights)) is not None:
        raise ValueError(f"experts.backend '{backend}' {reason}")
    return BACKENDS[backend].run(x_TD, plan, weights)


def best_backend(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> str:
    """Return the name of the backend that `auto` chooses."""
    if not is_transform_on():
        for name, entry in BACKENDS.items():
            is_for = entry.auto_on == x_TD.device.type
            if is_for and entry.unsupported_reason(x_TD, weights) is None:
                return name
    return "loop"
