"""Choosing experts and sorting pairs by them: compiled loops on a CPU, torch's own functions elsewhere.

T tokens, E experts, K experts per token, N (token, expert) pairs
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from moe_ffn.native.build import why_not
from moe_ffn.torch_modes import transforms_at_work


def top_k(scores_TE: Tensor, k: int) -> Tensor:
    """int64 (T, K), the experts with the largest scores, the largest first; nothing is differentiated.

    Of equal scores, the compiled loop takes the expert with the lower number; torch names no order.
    """
    if scores_TE.dtype == torch.float32 and _is_compiled(scores_TE):
        return torch.ops.moe_ffn_cpu.top_k(scores_TE.detach(), k)
    return scores_TE.topk(k, dim=-1).indices


def sort_by_expert(expert_ids_N: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """The order (N,) that sorts ids of 0 to `num_experts`, and int32 (E,), where each expert's pairs end.

    Stable: of equal ids, the first stands before. Pairs with the id `num_experts` stand behind all.
    """
    if _is_compiled(expert_ids_N):
        return torch.ops.moe_ffn_cpu.sort_by_expert(expert_ids_N, num_experts)
    sorted_N, order_N = expert_ids_N.sort(stable=True)
    experts_E = torch.arange(num_experts, device=expert_ids_N.device)
    return order_N, torch.searchsorted(sorted_N, experts_E, right=True, out_int32=True)


def _is_compiled(x: Tensor) -> bool:
    """Whether the loops are there, for a tensor with numbers on the CPU, outside of graphs and transforms."""
    return (
        not torch.compiler.is_compiling()
        and x.device.type == "cpu"
        and type(x) is Tensor
        and _get_current_dispatch_mode() is None
        and not transforms_at_work()
        and why_not() is None
    )
