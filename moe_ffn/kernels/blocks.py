"""Experts on a CPU without a compiler: torch's products on blocks of rows that stay in the cache.

Apart from the products, the time goes into page faults on fresh buffers, passes over memory, and calls. So
gathers, activations and weights go over one block of rows at a time, in buffers that are reused; the
results of a token's experts are added up by one `embedding_bag`; and of the forward pass only the first
product is kept, from which backward computes the rest again. docs/performance.md has the measurements.

T tokens, D model width, E experts, F hidden width, N computed (token, expert) pairs, O out,
I in, H rows of the first matrix: F, or 2 F where there is a gate
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ffn.kernels.activations import Activation
from moe_ffn.kernels.autograd import Gradients, Implementation, Inputs, run
from moe_ffn.kernels.base import ExpertWeights, product_dtype_on_cpu
from moe_ffn.kernels.gradient_memory import empty_gradient
from moe_ffn.kernels.torch_modes import autograd_in_operators
from moe_ffn.outputs import Plan


def blocks(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """The experts by torch's own products; see `autograd.run`."""
    return run(BLOCKS, x_TD, plan, weights)


def _forward(inputs: Inputs, kept_NH: Tensor | None) -> Tensor:
    x_TD, weights_N, (up_EHD, down_EDF, up_bias_EH, down_bias_ED), *_ = inputs
    dtype, dropout_NF = product_dtype_on_cpu(inputs.dtype), inputs.dropout_NF
    rows, blocks = Rows.of(inputs), cut_blocks(inputs.offsets_E.tolist())
    workspace = Workspace(blocks, dtype)
    up, down = Products(up_EHD, up_bias_EH, dtype), Products(down_EDF, down_bias_ED, dtype)
    activation = BlockActivation(inputs.options, workspace)
    num_rows, (d_model, width) = len(weights_N), (x_TD.shape[1], up_EHD.shape[1])
    x_input_TD = x_TD.to(dtype)
    y_ND = x_TD.new_empty(num_rows, d_model, dtype=dtype)

    for block in blocks:
        x_ND = rows.gather(x_input_TD, block, workspace("x", block.num_rows, d_model))
        if kept_NH is not None and kept_NH.dtype == dtype:
            up_NH = kept_NH[block.rows]
        else:
            up_NH = workspace("up", block.num_rows, width)
        for piece, x, out in block.split(x_ND, up_NH):
            up.linear(piece.expert, x, out)
        if kept_NH is not None and kept_NH.dtype != dtype:
            kept_NH[block.rows] = up_NH
        hidden_NF = activation.hidden(up_NH)
        if dropout_NF is not None:
            hidden_NF.mul_(dropout_NF[block.rows])
        for piece, hidden, out in block.split(hidden_NF, y_ND[block.rows]):
            down.linear(piece.expert, hidden, out)
    return rows.sum_per_token(y_ND, weights_N).to(x_TD.dtype)


def _backward(
    inputs: Inputs, kept_NH: Tensor, grad_y_TD: Tensor, wanted: Sequence[bool]
) -> Gradients:
    x_TD, weights_N, (up_EHD, down_EDF, up_bias_EH, down_bias_ED), *_ = inputs
    dtype, dropout_NF = product_dtype_on_cpu(inputs.dtype), inputs.dropout_NF
    rows, blocks = Rows.of(inputs), cut_blocks(inputs.offsets_E.tolist())
    workspace = Workspace(blocks, dtype)
    up, down = Products(up_EHD, None, dtype), Products(down_EDF, down_bias_ED, dtype)
    wants_x, _, wants_up, wants_down, *wants_biases = wanted
    up_gradient = down_gradient = None  # of frozen experts
    if wants_up or wants_biases[0]:
        up_gradient = WeightGradient(up_EHD, up_bias_EH, dtype)
    if wants_down or wants_biases[1]:
        down_gradient = WeightGradient(down_EDF, down_bias_ED, dtype)
    activation = BlockActivation(inputs.options, workspace)
    x_input_TD, grad_y_TD = x_TD.to(dtype), grad_y_TD.to(dtype).contiguous()
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
        grad_weights_block_N = grad_weights_N[block.rows]
        torch.sum(product_NF, -1, dtype=weights_N.dtype, out=grad_weights_block_N)
        factors_block_N1 = factors_N1[block.rows]
        hidden_NF.mul_(factors_block_N1)
        grad_NF.mul_(factors_block_N1)
        if dropout_NF is not None:
            grad_NF.mul_(dropout_NF[block.rows])
        grad_up_NH = activation.gradient(grad_NF, up_NH)

        x_ND = rows.gather(x_input_TD, block, workspace("x", block.num_rows, d_model))
        values = (grad_y_ND, hidden_NF, grad_up_NH, x_ND, grad_x_ND[block.rows])
        for piece, grad_y, hidden, grad_pre, x, out in block.split(*values):
            if down_gradient is not None:
                down_gradient.add(piece, grad_y, hidden, factors_block_N1[piece.rows])
            if up_gradient is not None:
                up_gradient.add(piece, grad_pre, x)
            if wants_x:
                up.input_gradient(piece.expert, grad_pre, out)
            if down.bias_E is not None:
                grad_weights_block_N[piece.rows] += grad_y @ down.bias_E[piece.expert]

    grad_up_EHD, grad_up_bias_EH = up_gradient.finish() if up_gradient else (None, None)
    grad_down_EDF, grad_down_bias_ED = down_gradient.finish() if down_gradient else (None, None)
    return (
        rows.sum_per_token(grad_x_ND).to(x_TD.dtype) if wants_x else None,
        grad_weights_N,
        *(grad_up_EHD, grad_down_EDF, grad_up_bias_EH, grad_down_bias_ED),
    )


BLOCKS = Implementation(_forward, _backward)


# ---------------------------------------------------------------------------- rows and blocks

MIN_BLOCK_ROWS, MAX_BLOCK_ROWS = 1024, 2048
"""Smaller blocks need more calls for gathers and activations; larger ones fall out of the cache."""


@dataclass(frozen=True)
class Piece:
    """Consecutive rows of one expert: one matrix product per weight."""

    expert: int
    rows: slice
    """The rows, relative to the start of the block."""
    continues: bool
    """The expert has rows in the previous block too, so that gradients of its weights add up."""


@dataclass(frozen=True)
class Block:
    """Consecutive rows of the plan."""

    rows: slice
    pieces: tuple[Piece, ...]

    @property
    def num_rows(self) -> int:
        return self.rows.stop - self.rows.start

    def split(self, *values_N: Tensor) -> Iterator[tuple[Any, ...]]:
        """(piece, its rows of each of `values_N`), for every piece."""
        # As views of one split: a slice at a time would cost as much as the inputs of a small product.
        sizes = [piece.rows.stop - piece.rows.start for piece in self.pieces]
        return zip(
            self.pieces, *(values.split_with_sizes(sizes) for values in values_N), strict=True
        )


def cut_blocks(offsets: Sequence[int]) -> list[Block]:
    """The blocks of a plan: small experts share one, a large expert is cut into several.

    Args:
        offsets: where each expert's rows end.
    """
    blocks: list[Block] = []
    pieces: list[Piece] = []
    block_start = expert_start = 0
    for expert, expert_stop in enumerate(offsets):
        start = expert_start
        while start < expert_stop:
            stop = min(expert_stop, block_start + MAX_BLOCK_ROWS)
            rows = slice(start - block_start, stop - block_start)
            pieces.append(Piece(expert, rows, continues=start > expert_start))
            start = stop
            if stop - block_start >= MIN_BLOCK_ROWS:
                blocks.append(Block(slice(block_start, stop), tuple(pieces)))
                pieces, block_start = [], stop
        expert_start = expert_stop
    if pieces:
        blocks.append(Block(slice(block_start, expert_start), tuple(pieces)))
    return blocks


class Rows(NamedTuple):
    """The rows of the computed pairs, in the order of the plan, and the order of their tokens."""

    token_ids_N: Tensor
    by_token_N: Tensor
    """The rows in the order of their tokens."""
    starts_T: Tensor
    """Where each token's rows begin in `by_token_N`."""

    @classmethod
    def of(cls, inputs: Inputs) -> Rows:
        num_rows = len(inputs.weights_N)
        token_ids_N = inputs.token_ids_N[:num_rows]
        by_token_N = torch.empty_like(inputs.pair_ids_N)
        by_token_N[inputs.pair_ids_N] = torch.arange(len(by_token_N), device="cpu")
        if num_rows < len(by_token_N):
            by_token_N = by_token_N[by_token_N < num_rows]
        zeros_T = token_ids_N.new_zeros(len(inputs.x_TD))
        counts_T = zeros_T.scatter_add_(0, token_ids_N, torch.ones_like(token_ids_N))
        return cls(token_ids_N, by_token_N, counts_T.cumsum(0) - counts_T)

    def gather(self, x_TD: Tensor, block: Block, out_ND: Tensor) -> Tensor:
        """The block's rows of `x_TD`."""
        return torch.index_select(x_TD, 0, self.token_ids_N[block.rows], out=out_ND)

    def sum_per_token(self, values_ND: Tensor, weights_N: Tensor | None = None) -> Tensor:
        """(T, D): the weighted sum of each token's rows, in one pass."""
        if not len(self.by_token_N):
            return values_ND.new_zeros(len(self.starts_T), values_ND.shape[1])
        if weights_N is not None:
            weights_N = weights_N.index_select(0, self.by_token_N).to(values_ND.dtype)
        return F.embedding_bag(
            self.by_token_N, values_ND, self.starts_T, mode="sum", per_sample_weights=weights_N
        )


class Workspace:
    """Scratch buffers by name, each large enough for every block.

    A fresh large buffer costs a page fault per 4 KiB when it is first written, which on a CPU can
    cost as much as the arithmetic on it.
    """

    def __init__(self, blocks: Sequence[Block], dtype: torch.dtype) -> None:
        self.rows = max((block.num_rows for block in blocks), default=0)
        self.dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, rows: int, width: int) -> Tensor:
        """The first `rows` rows of the buffer called `name`."""
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = torch.empty(self.rows, width, dtype=self.dtype, device="cpu")
            self._buffers[name] = buffer
        return buffer[:rows]


# ------------------------------------------------------------------------------------ products


class Products:
    """Products in `dtype`; a weight of another dtype is converted one expert at a time."""

    def __init__(self, weight_EOI: Tensor, bias_EO: Tensor | None, dtype: torch.dtype) -> None:
        self.weight_E = weight_EOI.unbind()
        self.bias_E = None if bias_EO is None else bias_EO.to(dtype).unbind()
        self._expert = -1
        self._converted_OI = None
        if weight_EOI.dtype != dtype:
            self._converted_OI = torch.empty(weight_EOI.shape[1:], dtype=dtype, device="cpu")

    def linear(self, expert: int, input_NI: Tensor, out_NO: Tensor) -> None:
        weight_IO = self._weight(expert).t()
        if self.bias_E is None:
            torch.mm(input_NI, weight_IO, out=out_NO)
        else:
            torch.addmm(self.bias_E[expert], input_NI, weight_IO, out=out_NO)

    def input_gradient(self, expert: int, grad_NO: Tensor, out_NI: Tensor) -> None:
        torch.mm(grad_NO, self._weight(expert), out=out_NI)

    def _weight(self, expert: int) -> Tensor:
        if self._converted_OI is None:
            return self.weight_E[expert]
        if self._expert != expert:
            self._expert = expert
            self._converted_OI.copy_(self.weight_E[expert])
        return self._converted_OI


class WeightGradient:
    """The gradient of a stacked weight and its bias; zero for experts that got no rows."""

    def __init__(self, weight_EOI: Tensor, bias_EO: Tensor | None, dtype: torch.dtype) -> None:
        self.weight_EOI = empty_gradient(weight_EOI)
        self.bias_EO = None if bias_EO is None else torch.zeros_like(bias_EO)
        self._weight_E = self.weight_EOI.unbind()
        self._idle = set(range(len(self._weight_E)))
        self._sum_OI = None
        if dtype != weight_EOI.dtype:
            self._sum_OI = torch.empty(weight_EOI.shape[1:], dtype=dtype, device="cpu")

    def add(
        self, piece: Piece, grad_NO: Tensor, input_NI: Tensor, factors_N1: Tensor | None = None
    ) -> None:
        """Add the rows of a piece; in the gradient of the bias, times `factors_N1`."""
        weight_OI = self._weight_E[piece.expert]
        sum_OI = weight_OI if self._sum_OI is None else self._sum_OI
        if piece.continues:
            sum_OI.addmm_(grad_NO.t(), input_NI)
        else:
            torch.mm(grad_NO.t(), input_NI, out=sum_OI)
        if self._sum_OI is not None:
            weight_OI.copy_(self._sum_OI)
        self._idle.discard(piece.expert)
        if self.bias_EO is not None:
            weighted = grad_NO.sum(0) if factors_N1 is None else factors_N1.t().mm(grad_NO)[0]
            self.bias_EO[piece.expert] += weighted

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """The gradients of the weight and of the bias."""
        for expert in self._idle:
            self._weight_E[expert].zero_()
        return self.weight_EOI, self.bias_EO


# ---------------------------------------------------------------------------------- activation


class BlockActivation:
    """The hidden units of a block, and once their gradient, in reused buffers.

    `gradient` follows `hidden` of the same block and may overwrite what it returned.
    """

    def __init__(self, weights: ExpertWeights, workspace: Workspace) -> None:
        # The backend applies dropout, since it needs the mask again in backward.
        self.weights = replace(weights, dropout=0.0)
        self.workspace = workspace
        self.by_autograd = weights.gate_function is not None or weights.interleaved
        self.function, self.derivative = IN_PLACE[weights.activation]

    def hidden(self, up_NH: Tensor) -> Tensor:
        """(N, F) from the first product."""
        if self.by_autograd:
            with autograd_in_operators():
                self.up_NH = up_NH.detach().requires_grad_()
                self.hidden_NF = self.weights.activate(self.up_NH)
            return self.hidden_NF.detach().clone()
        if not self.weights.gated:
            return self.function(up_NH, out=self.workspace("hidden", *up_NH.shape))
        gate_NF, up_NF = up_NH.chunk(2, dim=-1)
        self.activated_NF = self.workspace("activated", *gate_NF.shape)
        self.function(gate_NF, out=self.activated_NF)
        return torch.mul(self.activated_NF, up_NF, out=self.workspace("hidden", *gate_NF.shape))

    def gradient(self, grad_NF: Tensor, up_NH: Tensor) -> Tensor:
        """(N, H), the gradient of the first product, from that of the hidden units (overwritten)."""
        if self.by_autograd:
            (grad_up_NH,) = torch.autograd.grad(self.hidden_NF, self.up_NH, grad_NF)
            return grad_up_NH
        grad_up_NH = self.workspace("grad_up", *up_NH.shape)
        if not self.weights.gated:
            return self.derivative(grad_NF, up_NH, grad_input=grad_up_NH)
        gate_NF, up_NF = up_NH.chunk(2, dim=-1)
        grad_of_gate_NF, grad_of_up_NF = grad_up_NH.chunk(2, dim=-1)
        torch.mul(grad_NF, self.activated_NF, out=grad_of_up_NF)
        self.derivative(grad_NF.mul_(up_NF), gate_NF, grad_input=grad_of_gate_NF)
        return grad_up_NH


aten: Any = torch.ops.aten


def relu_squared(x: Tensor, out: Tensor) -> Tensor:
    return aten.relu.out(x, out=out).square_()


def relu_squared_gradient(grad: Tensor, x: Tensor, grad_input: Tensor) -> Tensor:
    return aten.relu.out(x, out=grad_input).mul_(grad).mul_(2)


def sigmoid_gradient(grad: Tensor, x: Tensor, grad_input: Tensor) -> Tensor:
    value = torch.sigmoid(x, out=grad_input)
    return aten.sigmoid_backward.grad_input(grad, value, grad_input=grad_input)


IN_PLACE: dict[Activation, tuple[Any, Any]] = {
    "relu": (aten.relu.out, partial(aten.threshold_backward.grad_input, threshold=0)),
    "gelu": (aten.gelu.out, aten.gelu_backward.grad_input),
    "gelu_tanh": (
        partial(aten.gelu.out, approximate="tanh"),
        partial(aten.gelu_backward.grad_input, approximate="tanh"),
    ),
    "silu": (aten.silu.out, aten.silu_backward.grad_input),
    "relu_squared": (relu_squared, relu_squared_gradient),
    "sigmoid": (torch.sigmoid, sigmoid_gradient),
    "identity": (
        lambda x, out: out.copy_(x),
        lambda grad, x, grad_input: grad_input.copy_(grad),
    ),
}
"""Name -> (x, out) -> out, and (gradient, x, grad_input) -> grad_input."""
