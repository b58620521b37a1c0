"""The experts as torch sees them: one operator forward and one backward, opaque to it.

So torch.compile and export take them without a break in the graph; they are told the shapes of the
outputs alone.

T tokens, D model width, E experts, F hidden width, N (token, expert) pairs, H rows of the first
matrix: F, or 2 F where the rows of a gate stand before those of up
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from moe_ffn.kernels.base import no_second_derivative
from moe_ffn.kernels.triton import launch


@torch.library.custom_op("moe_ffn::experts", mutates_args=())
def experts(
    x_TD: Tensor,
    weights_N: Tensor,
    up_EHD: Tensor,
    down_EDF: Tensor,
    up_bias_EH: Tensor | None,
    down_bias_ED: Tensor | None,
    token_ids_N: Tensor,
    offsets_E: Tensor,
    ranks_N: Tensor,
    starts: Tensor,
    dropout_NF: Tensor | None,
    activation: str,
    clamp: list[float] | None,
    dtype: torch.dtype,
    keep: bool,
) -> tuple[Tensor, Tensor]:
    """y_TD, and the pre-activations (N, H) if backward is to come, else none of their rows."""
    with torch.cuda.device_of(x_TD):  # Triton launches on the current device
        rows = launch.Rows(token_ids_N, offsets_E, dtype)
        epilogue = launch.Epilogue.of(activation, up_EHD, down_EDF, clamp)
        hidden_NF, pre_NH = launch.hidden(
            rows,
            epilogue,
            _rows_of(x_TD, dtype),
            _matrices(up_EHD, dtype),
            _contiguous(up_bias_EH),
            dropout_NF,
            keep,
        )
        y_ND = launch.product(
            rows, hidden_NF, _matrices(down_EDF, dtype), _contiguous(down_bias_ED)
        )
        y_TD = launch.combine(rows, y_ND, weights_N, ranks_N, starts, x_TD.dtype)
        return y_TD, pre_NH


@experts.register_fake
def _(x_TD: Tensor, weights_N: Tensor, up_EHD: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    _, _, _, token_ids_N, *_, dtype, keep = others
    num_kept = token_ids_N.shape[0] if keep else 0
    return x_TD.new_empty(x_TD.shape), x_TD.new_empty(num_kept, up_EHD.shape[1], dtype=dtype)


@torch.library.custom_op("moe_ffn::experts_backward", mutates_args=())
def experts_backward(
    dy_TD: Tensor,
    x_TD: Tensor,
    weights_N: Tensor,
    up_EHD: Tensor,
    down_EDF: Tensor,
    up_bias_EH: Tensor | None,
    down_bias_ED: Tensor | None,
    token_ids_N: Tensor,
    offsets_E: Tensor,
    ranks_N: Tensor,
    starts: Tensor,
    dropout_NF: Tensor | None,
    pre_NH: Tensor,
    activation: str,
    clamp: list[float] | None,
    wanted: list[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """The gradients of the first six inputs of `experts`; empty where they are not wanted."""
    with torch.cuda.device_of(x_TD):
        dtype = pre_NH.dtype
        rows = launch.Rows(token_ids_N, offsets_E, dtype)
        epilogue = launch.Epilogue.of(activation, up_EHD, down_EDF, clamp)
        dy_TD = _rows_of(dy_TD, dtype)
        d_pre_NH, hidden_NF, d_weights_N = launch.hidden_gradient(
            rows,
            epilogue,
            dy_TD,
            _matrices(down_EDF, dtype),
            _contiguous(down_bias_ED),
            dropout_NF,
            weights_N,
            pre_NH,
        )
        want_x, want_weights, want_up, want_down, want_up_bias, want_down_bias = wanted
        grads = [x_TD.new_empty(0) for _ in wanted]
        if want_weights:
            grads[1] = d_weights_N.to(weights_N.dtype)
        if want_down:
            grads[3] = launch.weight_gradient(rows, dy_TD, hidden_NF, down_EDF, gather="output")
        del hidden_NF
        if want_up:
            x_rows_TD = _rows_of(x_TD, dtype)
            grads[2] = launch.weight_gradient(rows, d_pre_NH, x_rows_TD, up_EHD, gather="input")
        if want_up_bias and up_bias_EH is not None:
            grads[4] = launch.bias_gradient(rows, d_pre_NH, up_bias_EH)
        if want_down_bias and down_bias_ED is not None:
            grads[5] = launch.bias_gradient(rows, dy_TD, down_bias_ED, weights_N)
        if want_x:
            d_x_ND = launch.product(rows, d_pre_NH, _matrices(up_EHD, dtype).transpose(1, 2))
            grads[0] = launch.combine(rows, d_x_ND, None, ranks_N, starts, x_TD.dtype)
        return grads[0], grads[1], grads[2], grads[3], grads[4], grads[5]


@experts_backward.register_fake
def _(dy_TD: Tensor, x_TD: Tensor, *others: Any) -> tuple[Tensor, ...]:
    inputs, wanted = (x_TD, *others)[:6], others[-1]
    return tuple(
        tensor.new_empty(tensor.shape) if want and tensor is not None else x_TD.new_empty(0)
        for tensor, want in zip(inputs, wanted, strict=True)
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    """Beside the inputs, the pre-activations: no gathered tokens and no hidden units."""
    *tensors, activation, clamp, _, keep = inputs
    pre_NH = output[1]
    assert keep, "the pre-activations of a forward pass that needs gradients are kept"
    ctx.mark_non_differentiable(pre_NH)
    ctx.set_materialize_grads(False)  # zeros for the pre-activations would be as large as they are
    ctx.save_for_backward(*tensors, pre_NH)
    ctx.activation, ctx.clamp = activation, clamp


def _backward(ctx: Any, dy_TD: Tensor | None, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dy_TD is None:
        return (None,) * 15
    wanted = list(ctx.needs_input_grad[:6])
    grads = experts_backward(dy_TD, *ctx.saved_tensors, ctx.activation, ctx.clamp, wanted)
    kept = [grad if want else None for grad, want in zip(grads, wanted, strict=True)]
    return (*kept, *(None,) * 9)


def _refuse(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
    raise no_second_derivative("triton")


experts.register_autograd(_backward, setup_context=_save)
experts_backward.register_autograd(_refuse)


def _rows_of(x_TD: Tensor, dtype: torch.dtype) -> Tensor:
    """With neighbouring columns beside each other, as kernels read them."""
    x_TD = x_TD.to(dtype)
    return x_TD if x_TD.stride(1) == 1 else x_TD.contiguous()


def _matrices(weight_EOI: Tensor, dtype: torch.dtype) -> Tensor:
    return weight_EOI.to(dtype).contiguous()


def _contiguous(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.contiguous()
