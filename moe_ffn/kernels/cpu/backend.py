"""The backend `cpu`: the experts' output, and their gradients by a backward pass of its own.

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
    needs_gradient,
    no_second_derivative,
    outside_graphs,
    product_dtype_on_cpu,
)
from moe_ffn.kernels.cpu.activation import block_activation
from moe_ffn.kernels.cpu.products import Products, WeightGradient, Workspace
from moe_ffn.kernels.cpu.rows import Rows
from moe_ffn.transforms import is_batched, transforms_at_work


@outside_graphs
def cpu(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """Any dtype; reads the offsets on the host. An expert without tokens gets a zero gradient."""
    rows = Rows.of(plan, num_tokens=x_TD.shape[0])
    tensors = (
        x_TD,
        plan.weights_N[: len(rows)],
        weights.up_EHD,
        weights.down_EDF,
        weights.up_bias_EH,
        weights.down_bias_ED,
    )
    return _ExpertsOnCPU.apply(*tensors, rows, weights, needs_gradient(*tensors))


def refusal(x_TD: Tensor, weights: ExpertWeights) -> str | None:
    """Why it does not take these tokens; None when it does."""
    if x_TD.device.type == "cpu":
        return NOT_BY_TRANSFORMS if transforms_at_work() else None
    return f"is for tensors on the CPU, but x is on {x_TD.device}; use 'auto'"


class _ExpertsOnCPU(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_TD: Tensor,
        weights_N: Tensor,
        up_EHD: Tensor,
        down_EDF: Tensor,
        up_bias_EH: Tensor | None,
        down_bias_ED: Tensor | None,
        rows: Rows,
        weights: ExpertWeights,
        trains: bool,
    ) -> Tensor:
        kept_dtype = compute_dtype(x_TD)
        dtype = product_dtype_on_cpu(kept_dtype)
        workspace = Workspace(rows.largest_block, dtype)
        up, down = Products(up_EHD, up_bias_EH, dtype), Products(down_EDF, down_bias_ED, dtype)
        activation = block_activation(weights, workspace)
        dropout_NF = dropout_mask(len(rows), weights, dtype, x_TD.device)
        width = up_EHD.shape[1]
        kept_NH = x_TD.new_empty(len(rows) if trains else 0, width, dtype=kept_dtype)
        x_input_TD = x_TD.to(dtype)
        y_ND = x_TD.new_empty(len(rows), x_TD.shape[1], dtype=dtype)

        for block in rows.blocks:
            x_ND = rows.gather(x_input_TD, block, workspace("x", block.num_rows, x_TD.shape[1]))
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
            ctx.save_for_backward(
                x_TD,
                weights_N,
                up_EHD,
                down_EDF,
                up_bias_EH,
                down_bias_ED,
                kept_NH,
                dropout_NF,
                *rows.tensors,
            )
            ctx.blocks, ctx.weights, ctx.dtype = rows.blocks, weights, dtype
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
        inputs, (kept_NH, dropout_NF, *row_tensors) = saved[:6], saved[6:]
        x_TD, weights_N, up_EHD, down_EDF, up_bias_EH, down_bias_ED = inputs
        token_ids_N, by_token_N, starts_T = row_tensors
        rows = Rows(token_ids_N, by_token_N, starts_T, ctx.blocks)
        dtype: torch.dtype = ctx.dtype
        workspace = Workspace(rows.largest_block, dtype)
        up, down = Products(up_EHD, None, dtype), Products(down_EDF, None, dtype)
        wants_x, _, wants_up, wants_down, *wants_biases = ctx.needs_input_grad[:6]
        up_gradient = down_gradient = None  # of frozen experts
        if wants_up or wants_biases[0]:
            up_gradient = WeightGradient(up_EHD, up_bias_EH, dtype)
        if wants_down or wants_biases[1]:
            down_gradient = WeightGradient(down_EDF, down_bias_ED, dtype)
        activation = block_activation(ctx.weights, workspace)
        x_input_TD, grad_y_TD = x_TD.to(dtype), grads[0].to(dtype).contiguous()
        grad_x_ND = x_TD.new_empty(len(rows), x_TD.shape[1] if wants_x else 0, dtype=dtype)
        grad_weights_N = torch.empty_like(weights_N)
        factors_N1 = weights_N.to(dtype).unsqueeze(-1)

        for block in rows.blocks:
            up_NH = kept_NH[block.rows]
            if up_NH.dtype != dtype:
                up_NH = workspace("up", *up_NH.shape).copy_(up_NH)
            hidden_NF = activation.hidden(up_NH)
            grad_NF = workspace("grad_hidden", *hidden_NF.shape)
            size = (block.num_rows, x_TD.shape[1])
            grad_y_ND = rows.gather(grad_y_TD, block, workspace("grad_y", *size))
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

            x_ND = rows.gather(x_input_TD, block, workspace("x", *size))
            grad_x_here_ND = grad_x_ND[block.rows]
            parts = block.split(grad_y_ND, hidden_NF, grad_up_NH, x_ND, grad_x_here_ND)
            for piece, grad_y, hidden, grad_pre, x, out in parts:
                expert = piece.expert
                if down_gradient is not None:
                    down_gradient.add(expert, grad_y, hidden, piece.continues)
                    if down_bias_ED is not None:
                        factors_1N = factors_here_N1[piece.rows].t()
                        down_gradient.add_bias(expert, factors_1N.mm(grad_y)[0])
                if up_gradient is not None:
                    up_gradient.add(expert, grad_pre, x, piece.continues)
                    if up_bias_EH is not None:
                        up_gradient.add_bias(expert, grad_pre.sum(0))
                if wants_x:
                    up.input_gradient(expert, grad_pre, out)
                if down_bias_ED is not None:
                    bias_D = down_bias_ED[expert].to(dtype)
                    grad_weights_here_N[piece.rows] += grad_y @ bias_D

        grad_up_EHD, grad_up_bias_EH = (None, None) if up_gradient is None else up_gradient.finish()
        grad_down_EDF, grad_down_bias_ED = (
            (None, None) if down_gradient is None else down_gradient.finish()
        )
        return (
            rows.sum_per_token(grad_x_ND).to(x_TD.dtype) if wants_x else None,
            grad_weights_N,
            grad_up_EHD,
            grad_down_EDF,
            grad_up_bias_EH,
            grad_down_bias_ED,
            *(None,) * 3,
        )
