"""Logits, top-k and the sort of pairs by expert, in C++ on a CPU, otherwise in torch.

T tokens, D model width, E experts, K experts per token, N (token, expert) pairs
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ffn.kernels.base import is_dispatch_mode_on, is_transform_on, without_autocast
from moe_ffn.kernels.native.build import unavailable_reason

NARROW = (torch.bfloat16, torch.float16)

MAX_K = 32
"""Maximum k of the compiled top-k, an insertion sort; for larger k torch is faster."""


def float32_linear(x_TD: Tensor, weight_ED: Tensor) -> Tensor:
    """Return `F.linear` in the dtype of the weight, without gradient.

    For narrower tokens, the C++ loop converts a few at a time, so that no float32 copy of all tokens exists.
    """
    # A custom router with wrong shapes or dtypes gets torch's error messages.
    is_narrow = x_TD.dtype in NARROW and x_TD.ndim == weight_ED.ndim == 2
    if is_narrow and weight_ED.dtype == torch.float32 and is_compiled_for(x_TD, weight_ED):
        return torch.ops.moe_ffn_cpu.float32_linear(x_TD.detach(), weight_ED.detach())
    with without_autocast(x_TD):
        return F.linear(x_TD.to(weight_ED.dtype), weight_ED)


def float32_linear_backward(
    grad_TE: Tensor, x_TD: Tensor, weight_ED: Tensor, *, wants_x: bool, wants_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of x, in its dtype, and of the weight; None for each that is not wanted."""
    is_narrow = x_TD.dtype in NARROW and grad_TE.ndim == x_TD.ndim == weight_ED.ndim == 2
    is_wide = grad_TE.dtype == weight_ED.dtype == torch.float32
    is_compiled = is_narrow and is_wide and is_compiled_for(grad_TE, x_TD, weight_ED)
    if is_compiled and not torch.is_grad_enabled():
        grad_x_TD, grad_ED = torch.ops.moe_ffn_cpu.float32_linear_backward(
            grad_TE, x_TD, weight_ED, wants_x, wants_weight
        )
        return grad_x_TD if wants_x else None, grad_ED if wants_weight else None
    with without_autocast(x_TD):
        return (
            (grad_TE @ weight_ED).to(x_TD.dtype) if wants_x else None,
            grad_TE.t() @ x_TD.to(grad_TE.dtype) if wants_weight else None,
        )


def top_k(scores_TE: Tensor, k: int) -> Tensor:
    """Return the experts with the k largest scores, int64 (T, K), in descending order of score.

    Among equal scores, the C++ loop prefers the lower expert id; torch guarantees no order.
    """
    if k <= MAX_K and scores_TE.dtype == torch.float32 and is_compiled_for(scores_TE):
        return torch.ops.moe_ffn_cpu.top_k(scores_TE.detach(), k)
    return scores_TE.topk(k, dim=-1).indices


def sort_by_expert(expert_ids_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Return the order (N,) that sorts pairs by expert, and the end of each expert's pairs, int32 (E,).

    The sort is stable. Pairs with id `num_experts` belong to no expert and come last.
    """
    if expert_ids_N.dtype == torch.int64 and is_compiled_for(expert_ids_N):
        return torch.ops.moe_ffn_cpu.sort_by_expert(expert_ids_N, num_experts)
    sorted_N, order_N = expert_ids_N.sort(stable=True)
    experts_E = torch.arange(num_experts, device=expert_ids_N.device)
    return order_N, torch.searchsorted(sorted_N, experts_E, right=True, out_int32=True)


def has_compiled_tiles(*tensors: Tensor) -> bool:
    """Return True if the C++ loops support these tensors, and oneDNN multiplies their tiles."""
    return is_compiled_for(*tensors) and torch.ops.moe_ffn_cpu.has_tiles()


def is_compiled_for(*tensors: Tensor) -> bool:
    """Return True if the C++ loops support these tensors: on the CPU, with data, outside graphs.

    Otherwise torch's functions run, so the operators need no implementation for tensors without data.
    """
    return (
        not torch.compiler.is_compiling()
        and all(x.device.type == "cpu" and type(x) in (Tensor, nn.Parameter) for x in tensors)
        and not is_dispatch_mode_on()
        and not is_transform_on()
        and unavailable_reason() is None
    )
