"""The backend `cpu`: one autograd function over the whole MLP, in blocks that stay in the cache.

Apart from the products, the time goes into page faults on fresh buffers, passes over memory, and calls. So
gathers, activations and weights go over one block of rows at a time, in buffers that are reused; the
results of a token's experts are added up by one `embedding_bag`; and of the forward pass only the first
product is kept, from which backward computes the rest again. docs/performance.md has the measurements.

T tokens, D model width, E experts, F hidden width, N computed (token, expert) pairs, H rows of the first
matrix: F, or 2 F where there is a gate
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ffn.dispatch import Plan
from moe_ffn.kernels.base import (
    NOT_BY_TRANSFORMS,
    ExpertWeights,
    compute_dtype,
    dropout_mask,
    is_batched,
    needs_gradient,
    no_second_derivative,
    outside_graphs,
    product_dtype_on_cpu,
    transforms_at_work,
)
from moe_ffn.kernels.cpu_blocks import (
    Block,
    BlockActivation,
    Products,
    Rows,
    WeightGradient,
    Workspace,
    cut_blocks,
)


@outside_graphs
def cpu(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """Any dtype; reads the offsets on the host. An expert without tokens gets a zero gradient."""
    blocks = cut_blocks(offsets := plan.offsets_E.tolist())
    rows = Rows.of(plan, offsets[-1], num_tokens=x_TD.shape[0])
    tensors = (x_TD, plan.weights_N[: offsets[-1]], *weights.parameters)
    return _ExpertsOnCPU.apply(rows, blocks, weights, needs_gradient(*tensors), *tensors)


def refusal(x_TD: Tensor, weights: ExpertWeights) -> str | None:
    """Why `cpu` does not take these tokens; None where it does."""
    if x_TD.device.type == "cpu":
        return NOT_BY_TRANSFORMS if transforms_at_work() else None
    return f"is for tensors on the CPU, but x is on {x_TD.device}; use 'auto'"


class _ExpertsOnCPU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        rows: Rows,
        blocks: list[Block],
        weights: ExpertWeights,
        trains: bool,
        x_TD: Tensor,
        weights_N: Tensor,
        *parameters: Any,
    ) -> Tensor:
        up_EHD, down_EDF, up_bias_EH, down_bias_ED = parameters
        kept_dtype = compute_dtype(x_TD)
        dtype = product_dtype_on_cpu(kept_dtype)
        workspace = Workspace(blocks, dtype)
        up, down = Products(up_EHD, up_bias_EH, dtype), Products(down_EDF, down_bias_ED, dtype)
        activation = BlockActivation(weights, workspace)
        num_rows, (d_model, width) = len(weights_N), (x_TD.shape[1], up_EHD.shape[1])
        dropout_NF = dropout_mask(num_rows, weights, dtype, x_TD.device)
        kept_NH = x_TD.new_empty(num_rows if trains else 0, width, dtype=kept_dtype)
        x_input_TD = x_TD.to(dtype)
        y_ND = x_TD.new_empty(num_rows, d_model, dtype=dtype)

        for block in blocks:
            x_ND = rows.gather(x_input_TD, block, workspace("x", block.num_rows, d_model))
            if trains and kept_dtype == dtype:
                up_NH = kept_NH[block.rows]
            else:
                up_NH = workspace("up", block.num_rows, width)
            for piece, x, out in block.split(x_ND, up_NH):
                up.linear(piece.expert, x, out)
            if trains and kept_dtype != dtype:
                kept_NH[block.rows] = up_NH
            hidden_NF = activation.hidden(up_NH)
            if dropout_NF is not None:
                hidden_NF.mul_(dropout_NF[block.rows])
            for piece, hidden, out in block.split(hidden_NF, y_ND[block.rows]):
                down.linear(piece.expert, hidden, out)

        if trains:
            ctx.save_for_backward(x_TD, weights_N, *parameters, kept_NH, dropout_NF, *rows)
            ctx.blocks, ctx.weights, ctx.dtype = blocks, weights, dtype
        return rows.sum_per_token(y_ND, weights_N).to(x_TD.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        # Not `once_differentiable`, whose error is not on the way from a gradient back to x: asked for
        # d/dx alone, torch passes it by.
        if torch.is_grad_enabled():
            raise no_second_derivative("cpu")
        if is_batched(grads[0]):
            raise RuntimeError(f"experts.backend 'cpu' {NOT_BY_TRANSFORMS}")
        saved = ctx.saved_tensors  # once: activation checkpointing computes them again for it
        x_TD, weights_N, up_EHD, down_EDF, up_bias_EH, down_bias_ED = saved[:6]
        kept_NH, dropout_NF, *row_tensors = saved[6:]
        rows, blocks = Rows(*row_tensors), ctx.blocks
        dtype: torch.dtype = ctx.dtype
        workspace = Workspace(blocks, dtype)
        up, down = Products(up_EHD, None, dtype), Products(down_EDF, down_bias_ED, dtype)
        wants_x, _, wants_up, wants_down, *wants_biases = ctx.needs_input_grad[4:]
        up_gradient = down_gradient = None  # of frozen experts
        if wants_up or wants_biases[0]:
            up_gradient = WeightGradient(up_EHD, up_bias_EH, dtype)
        if wants_down or wants_biases[1]:
            down_gradient = WeightGradient(down_EDF, down_bias_ED, dtype)
        activation = BlockActivation(ctx.weights, workspace)
        x_input_TD, grad_y_TD = x_TD.to(dtype), grads[0].to(dtype).contiguous()
        d_model = x_TD.shape[1]
        grad_x_ND = x_TD.new_empty(len(weights_N), d_model if wants_x else 0, dtype=dtype)
        grad_weights_N = torch.empty_like(weights_N)
        factors_N1 = weights_N.to(dtype).unsqueeze(-1)

        for block in blocks:
            up_NH = kept_NH[block.rows]
            if up_NH.dtype != dtype:
                up_NH = workspace("up", *up_NH.shape).copy_(up_NH)
            hidden_NF = activation.hidden(up_NH)
            grad_NF = workspace("grad_hidden", *hidden_NF.shape)
            grad_y_ND = workspace("grad_y", block.num_rows, d_model)
            rows.gather(grad_y_TD, block, grad_y_ND)
            for piece, grad_y, out in block.split(grad_y_ND, grad_NF):
                down.input_gradient(piece.expert, grad_y, out)
            if dropout_NF is not None:
                hidden_NF.mul_(dropout_NF[block.rows])

            # y = w (down h + b): dw is <dy, down h + b> = <down^T dy, h> + <dy, b>, taken on the
            # side of F, where w is multiplied with too: the narrower one.
            product_NF = torch.mul(grad_NF, hidden_NF, out=workspace("product", *grad_NF.shape))
            grad_weights_here_N = grad_weights_N[block.rows]
            torch.sum(product_NF, -1, dtype=weights_N.dtype, out=grad_weights_here_N)
            factors_here_N1 = factors_N1[block.rows]
            hidden_NF.mul_(factors_here_N1)
            grad_NF.mul_(factors_here_N1)
            if dropout_NF is not None:
                grad_NF.mul_(dropout_NF[block.rows])
            grad_up_NH = activation.gradient(grad_NF, up_NH)

            x_ND = rows.gather(x_input_TD, block, workspace("x", block.num_rows, d_model))
            values = (grad_y_ND, hidden_NF, grad_up_NH, x_ND, grad_x_ND[block.rows])
            for piece, grad_y, hidden, grad_pre, x, out in block.split(*values):
                if down_gradient is not None:
                    down_gradient.add(piece, grad_y, hidden, factors_here_N1[piece.rows])
                if up_gradient is not None:
                    up_gradient.add(piece, grad_pre, x)
                if wants_x:
                    up.input_gradient(piece.expert, grad_pre, out)
                if down.bias_E is not None:
                    grad_weights_here_N[piece.rows] += grad_y @ down.bias_E[piece.expert]

        grad_up_EHD, grad_up_bias_EH = up_gradient.finish() if up_gradient else (None, None)
        grad_down_EDF, grad_down_bias_ED = down_gradient.finish() if down_gradient else (None, None)
        return (
            *(None,) * 4,
            rows.sum_per_token(grad_x_ND).to(x_TD.dtype) if wants_x else None,
            grad_weights_N,
            *(grad_up_EHD, grad_down_EDF, grad_up_bias_EH, grad_down_bias_ED),
        )
