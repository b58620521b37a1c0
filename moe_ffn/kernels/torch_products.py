"""Backends with torch's matrix products: `loop`, one expert at a time, and `grouped_mm`, all at once.

T tokens, D model width, E experts, F hidden width, N (token, expert) pairs, O output width, I input width,
R rank of an adapter
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from moe_ffn.kernels.base import (
    ExpertWeights,
    combine,
    compute_dtype,
    is_forward_mode,
    is_transform_on,
)
from moe_ffn.outputs import Plan


def loop(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """Run experts one by one: a gather, two products per expert, and a scatter.

    The sizes of the products depend on the loads, which are copied to the host. torch.compile leaves the loop
    out of its graphs, because it would recompile them at every step.

    Raises:
        ValueError: under torch.export.
    """
    if not torch.compiler.is_compiling():
        return run_loop(x_TD, plan, weights)
    message = (
        "experts.backend 'loop' copies the loads of the experts to the host, which torch.export and "
        "torch.compile(fullgraph=True) cannot capture; set experts.backend to 'auto'"
    )
    if is_transform_on():
        message = (
            "experts under a torch.func transform cannot be compiled into the graph; call torch.compile "
            "without fullgraph=True"
        )
    if torch.compiler.is_exporting():
        raise ValueError(message)
    torch._dynamo.graph_break(msg=message)  # the error under `fullgraph=True`
    # Not a decorator: it would import torch's compiler, which takes about a second.
    return torch.compiler.disable(run_loop)(x_TD, plan, weights)  # pyright: ignore[reportCallIssue]


def run_loop(
    x_TD: Tensor,
    plan: Plan,
    weights: ExpertWeights,
    dtype: torch.dtype | None = None,
    dropout_NF: Tensor | None = None,
) -> Tensor:
    """Run `loop` in a given dtype, with a given dropout mask.

    An expert without tokens multiplies an empty slice, so that its gradient is zero: DDP and FSDP would hang
    if it were missing. Without gradients, such experts are skipped.

    Args:
        dtype: dtype of the weights and products; None: the dtype of the weights, or autocast's.
        dropout_NF: factor of each hidden unit, from `dropout_mask`.
    """
    ends = plan.offsets_E.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    experts = range(weights.num_experts)
    if not torch.is_grad_enabled():
        experts = [expert for expert in experts if sizes[expert]]
        sizes = [sizes[expert] for expert in experts]
    # Skip the pairs that are not computed, which are most pairs with ReLU or top-p routing.
    token_indices_N, weights_N = plan.token_indices_N[: ends[-1]], plan.weights_N[: ends[-1]]
    if not sizes:
        return torch.zeros_like(x_TD)
    x_rows_TD = x_TD if dtype is None else x_TD.to(dtype)
    inputs = x_rows_TD.index_select(0, token_indices_N).split_with_sizes(sizes)
    up_NH = _linear_per_expert(experts, inputs, *weights.first)
    hidden_NF = weights.activate(up_NH)
    if dropout_NF is not None:
        hidden_NF = hidden_NF * dropout_NF[: ends[-1]].to(hidden_NF.dtype)
    hidden = hidden_NF.split_with_sizes(sizes)
    y_ND = _linear_per_expert(experts, hidden, *weights.second)
    return combine(y_ND, x_TD, token_indices_N, weights_N)


def _linear_per_expert(
    experts: Sequence[int],
    inputs: Sequence[Tensor],
    weight_EOI: Tensor,
    bias_EO: Tensor | None,
    a_ERI: Tensor | None,
    b_EOR: Tensor | None,
) -> Tensor:
    weight_E, bias_E, a_E, b_E = weight_EOI, bias_EO, a_ERI, b_EOR
    if torch.is_grad_enabled():
        # Not `weight_EOI[expert]`: the gradient of each index would be as large as all experts' weights.
        weight_E, bias_E, a_E, b_E = (
            None if each is None else each.unbind() for each in (weight_EOI, bias_EO, a_ERI, b_EOR)
        )
    assert weight_E is not None
    outputs = list[Tensor]()
    for expert, input_NI in zip(experts, inputs, strict=True):
        output_NO = F.linear(input_NI, weight_E[expert], None if bias_E is None else bias_E[expert])
        if a_E is not None and b_E is not None:
            output_NO = output_NO + F.linear(F.linear(input_NI, a_E[expert]), b_E[expert])
        outputs.append(output_NO)
    return torch.cat(outputs)


ROW_BYTES = 16
"""Rows of grouped_mm must be a multiple of this number of bytes."""


def grouped_mm(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """Run all experts at once, without host synchronisation, in float32, bfloat16 or float16."""
    ranks_N = torch.arange(plan.token_indices_N.shape[0], device=x_TD.device)
    computed_N1 = (ranks_N < plan.offsets_E[-1]).unsqueeze(-1)
    expert_ids_N = torch.searchsorted(plan.offsets_E, ranks_N.to(torch.int32), right=True)
    expert_ids_N = expert_ids_N.clamp(max=weights.num_experts - 1)
    dtype = compute_dtype(x_TD)

    def linear(
        input_NI: Tensor,
        weight_EOI: Tensor,
        bias_EO: Tensor | None = None,
        a_ERI: Tensor | None = None,
        b_EOR: Tensor | None = None,
    ) -> Tensor:
        weight_EIO = rearrange(weight_EOI.to(dtype), "e o i -> e i o")
        output_NO = F.grouped_mm(input_NI, weight_EIO, offs=plan.offsets_E)
        if bias_EO is not None:
            output_NO = output_NO + bias_EO.to(dtype)[expert_ids_N]
        if a_ERI is not None and b_EOR is not None:
            padding = -a_ERI.shape[1] * dtype.itemsize % ROW_BYTES // dtype.itemsize
            a_ERI, b_EOR = F.pad(a_ERI, (0, 0, 0, padding)), F.pad(b_EOR, (0, padding))
            output_NO = output_NO + linear(linear(input_NI, a_ERI), b_EOR)
        return torch.where(computed_N1, output_NO, 0)

    # grouped_mm does not initialise rows after the last offset, neither in its output nor in its gradient.
    # `where` before and after each product replaces them by zeros.
    x_ND = torch.where(computed_N1, x_TD.to(dtype)[plan.token_indices_N], 0)
    up_NH = linear(x_ND, *weights.first)
    y_ND = linear(weights.activate(up_NH), *weights.second)
    return combine(y_ND, x_TD, plan.token_indices_N, plan.weights_N)


def grouped_mm_unsupported_reason(x_TD: Tensor, weights: ExpertWeights) -> str | None:
    """Return why `F.grouped_mm` does not support this dtype, width or transform; None if it does."""
    if is_forward_mode():
        return (
            "has no forward-mode derivative, which torch.func.jvp needs; set experts.backend to 'loop', "
            "which has one"
        )
    dtype = compute_dtype(x_TD)
    widths = (weights.d_model, weights.d_ff)
    if dtype in supported_dtypes() and all(w * dtype.itemsize % ROW_BYTES == 0 for w in widths):
        return None
    dtypes = ", ".join(map(str, supported_dtypes()))
    advice = "'auto'" if torch.compiler.is_compiling() else "'loop'"  # `loop` cannot be in a graph
    return (
        f"takes {dtypes} and rows that are a multiple of {ROW_BYTES} bytes, but got {dtype} "
        f"with d_model {weights.d_model} and d_ff {weights.d_ff}; use {advice}"
    )


def supported_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes that `F.grouped_mm` supports; under torch.compile, only bfloat16."""
    if torch.compiler.is_compiling():
        return (torch.bfloat16,)
    return (torch.float32, torch.bfloat16, torch.float16)
