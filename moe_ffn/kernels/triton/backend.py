"""The backend `triton`, and the reasons why it cannot run. It imports triton when it first runs.

T tokens, D model width, E experts, F hidden width, N (token, expert) pairs
"""

from __future__ import annotations

import os
from importlib.util import find_spec

import torch
from torch import Tensor

from moe_ffn.kernels.activations import ClampedSwiGLU
from moe_ffn.kernels.autograd import run_operator
from moe_ffn.kernels.base import (
    NO_TRANSFORMS,
    ExpertWeights,
    compute_dtype,
    dropout_mask,
    is_transform_on,
)
from moe_ffn.outputs import Plan

INSTALLED = find_spec("triton") is not None
MIN_CAPABILITY = 8
"""The compute capability of Ampere; the shared memory of older GPUs is too small for the tiles."""
SUPPORTED_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def triton(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """Run all experts without host synchronisation, in float32, bfloat16 or float16 of any width.

    The first call for each d_model, d_ff and dtype is slow: it compiles the kernels.
    Inputs, pre-activations and the dropout mask (N, F) are saved for backward.
    """
    from moe_ffn.kernels.triton.launch import experts  # imports triton, which is optional

    num_pairs, dtype = plan.token_indices_N.shape[0], compute_dtype(x_TD)
    dropout_NF = dropout_mask(num_pairs, weights, dtype, x_TD.device)
    order = _pairs_by_token(plan, x_TD.shape[0])
    return run_operator(experts, x_TD, plan, weights, order, dropout_NF)


def unsupported_reason(x_TD: Tensor, weights: ExpertWeights) -> str | None:
    """Return the reason why `triton` cannot run these tokens; None if it can."""
    if not INSTALLED:
        return "needs the package triton, which is not installed; use 'auto'"
    if x_TD.device.type != "cuda" and os.environ.get("TRITON_INTERPRET") != "1":
        return f"runs on GPUs, but the tokens are on the {x_TD.device.type}; use 'auto'"
    if x_TD.device.type == "cuda" and (reason := _gpu_unsupported_reason(x_TD.device)) is not None:
        return reason
    if weights.interleaved:
        return "needs all rows of a gate before the rows of up, but they alternate; use 'auto'"
    if weights.gate_function is not None and not isinstance(weights.gate_function, ClampedSwiGLU):
        return f"has no kernel for the gate {weights.gate_function}; use 'auto'"
    if is_transform_on():
        return NO_TRANSFORMS
    dtype = compute_dtype(x_TD)
    if dtype not in SUPPORTED_DTYPES:
        return f"takes {', '.join(map(str, SUPPORTED_DTYPES))}, but got {dtype}; use 'auto'"
    return None


def _gpu_unsupported_reason(device: torch.device) -> str | None:
    if torch.version.hip is not None:
        return "is for NVIDIA GPUs, but torch is built for ROCm; use 'auto'"
    major, minor = torch.cuda.get_device_capability(device)
    if major >= MIN_CAPABILITY:
        return None
    return (
        f"needs the shared memory of compute capability {MIN_CAPABILITY}.0, but {device} has "
        f"{major}.{minor}; use 'auto'"
    )


def _pairs_by_token(plan: Plan, num_tokens: int) -> tuple[Tensor, Tensor]:
    """Return the ranks of pairs in the plan, sorted by token, and the start of each token's pairs, then N."""
    num_pairs, device = plan.pair_ids_N.shape[0], plan.pair_ids_N.device
    ranks_N = torch.empty_like(plan.pair_ids_N).scatter_(
        0, plan.pair_ids_N, torch.arange(num_pairs, device=device)
    )
    tokens = torch.arange(num_tokens + 1, device=device)
    return ranks_N, torch.searchsorted(plan.token_indices_N.index_select(0, ranks_N), tokens)
