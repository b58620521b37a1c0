"""Dense blocks: two matrices, three matrices with a gate, two convolutions over positions, or nothing.

T tokens, B sequences, S tokens of a sequence, D model width
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from moe_ffn.config.base import MAX_COUNT, describe_options
from moe_ffn.config.errors import Unsupported, UseCase
from moe_ffn.config.sizes import HiddenWidth, gated_width, given_width, linear_flops, linear_params
from moe_ffn.ffn.base import FFNBlock, FFNConfig, check_input, flatten_tokens, without_padding
from moe_ffn.kernels.activations import (
    ACTIVATIONS,
    Activation,
    ClampOptions,
    GateOptions,
    GLUOptions,
    SoftCapOptions,
)
from moe_ffn.kernels.base import check_dtype
from moe_ffn.outputs import FFNOutput, TokenContext


class IdentityConfig(FFNConfig, frozen=True):
    """A block whose output is zero, for ablations."""

    type: Literal["identity"] = "identity"

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        return None

    def build(self, d_model: int) -> FFNBlock:
        return IdentityFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        return 0

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        return 0


class HiddenWidthConfig(FFNConfig, frozen=True):
    """Options of blocks with a hidden width."""

    d_ff: HiddenWidth = None
    """Hidden width. By default 4 * d_model, or 8/3 * d_model (rounded) with a gate, for equal cost.
    `{match: active_params, of: {type: dense, d_ff: 512}}` gives the block the cost of that block."""
    bias: bool = False
    """Add a bias to all matrices."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of zeroing a hidden unit, in training."""

    num_matrices: ClassVar[int] = 2

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        return None

    def width(self, d_model: int) -> int:
        return given_width(self.d_ff) or 4 * d_model

    def num_params(self, d_model: int) -> int:
        width = self.width(d_model)
        input_params = (self.num_matrices - 1) * linear_params(d_model, width, self.bias)
        return input_params + linear_params(width, d_model, self.bias)

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        return self.num_matrices * linear_flops(d_model, self.width(d_model))


class DenseConfig(HiddenWidthConfig, frozen=True):
    """Two matrices with an activation between them (Vaswani et al. 2017, section 3.3)."""

    type: Literal["dense"] = "dense"
    activation: Activation = "gelu"
    """Element-wise function between the two matrices."""

    def build(self, d_model: int) -> FFNBlock:
        return DenseFFN(self, d_model)


class GatedBaseConfig(GateOptions, HiddenWidthConfig, frozen=True):
    """Options of all gated blocks."""

    multiple_of: int = Field(default=8, ge=1, le=MAX_COUNT)
    """Round the default hidden width to a multiple of this number."""

    num_matrices: ClassVar[int] = 3

    def width(self, d_model: int) -> int:
        return given_width(self.d_ff) or gated_width(d_model, self.multiple_of)

    def build(self, d_model: int) -> FFNBlock:
        return GatedFFN(self, d_model)


class GatedConfig(GLUOptions, GatedBaseConfig, frozen=True):
    """A gated linear unit, down(act(gate x) * up x) (Shazeer 2020, arXiv:2002.05202).

    The type names the activation of the gate: SiLU for swiglu, GELU for geglu, its tanh approximation for
    geglu_tanh, ReLU for reglu, sigmoid for glu, none for bilinear.
    """


class ClampedSwiGLUConfig(ClampOptions, GatedBaseConfig, frozen=True):
    """SwiGLU with clamps, as in the shared experts of DeepSeek-V4 and MiniMax-M3."""


class SoftCappedSwiGLUConfig(SoftCapOptions, GatedBaseConfig, frozen=True):
    """SwiGLU whose gate and linear part are bounded by tanh, as in the dense layers of Inkling 2."""


class ConvConfig(HiddenWidthConfig, frozen=True):
    """Two 1-D convolutions over positions; with kernel size 1, the same as the dense block.

    Vaswani et al. 2017, section 3.3: "another way of describing this is as two convolutions with
    kernel size 1".
    """

    type: Literal["conv"] = "conv"
    kernel_size: int = Field(default=3, ge=1, le=MAX_COUNT)
    """Number of positions in the kernel of each convolution."""
    causal: bool = True
    """Read only the current and earlier positions. False centres the kernel, which causal models reject."""
    activation: Activation = "gelu"
    """Element-wise function between the two convolutions."""

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        if self.kernel_size == 1:
            return None
        if not self.causal and (use_case.causal or use_case.cached):
            return Unsupported(
                f"causal (false) with kernel_size ({self.kernel_size}) looks ahead",
                "set it to true",
            )
        if use_case.cached:
            return Unsupported(
                f"kernel_size ({self.kernel_size}) looks at earlier tokens", "use kernel_size 1"
            )
        return None

    def build(self, d_model: int) -> FFNBlock:
        return ConvFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        width, k = self.width(d_model), self.kernel_size
        up = linear_params(k * d_model, width, self.bias)
        return up + linear_params(k * width, d_model, self.bias)

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        return 2 * linear_flops(self.kernel_size * d_model, self.width(d_model))


class IdentityFFN(FFNBlock):
    """Returns zero, so a sublayer with a residual connection is the identity."""

    def __init__(self, config: IdentityConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model, self)
        # A constant zero would give the preceding norm no gradient, and DDP would hang.
        return FFNOutput(without_padding(x, context) * 0)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}"


class HiddenWidthFFN(FFNBlock):
    """A block with a hidden width; subclasses define `hidden` or `transform`."""

    config: Any  # each subclass has its own config class
    down: Any
    """The last matrix, or convolution."""

    def __init__(self, config: HiddenWidthConfig, d_model: int, activation: Activation) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model
        self.dropout = nn.Dropout(config.dropout)
        self.activation = ACTIVATIONS[activation]

    @abstractmethod
    def hidden(self, x: Tensor, context: TokenContext | None) -> Tensor:
        """Return the activations of the hidden units, (..., d_ff), before dropout."""

    def transform(self, x: Tensor, context: TokenContext | None) -> Tensor:
        """Return the output, (..., d_model), in any dtype."""
        return self.down(self.dropout(self.hidden(x, context)))

    @property
    def values_FD(self) -> Tensor:
        """Vector that each hidden unit adds to the output of its token."""
        return self.down.weight.t()

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model, self)
        check_dtype(x, next(self.parameters(), None))
        return FFNOutput(self.transform(x, context).to(x.dtype))

    def extra_repr(self) -> str:
        sizes = f"d_model={self.d_model}, d_ff={self.config.width(self.d_model)}"
        return f"{sizes}, {describe_options(self.config, without=['d_ff', 'bias', 'dropout'])}"


class DenseFFN(HiddenWidthFFN):
    """down(act(up x))."""

    def __init__(self, config: DenseConfig, d_model: int) -> None:
        super().__init__(config, d_model, config.activation)
        self.up = nn.Linear(d_model, config.width(d_model), bias=config.bias)
        self.down = nn.Linear(config.width(d_model), d_model, bias=config.bias)

    def hidden(self, x: Tensor, context: TokenContext | None) -> Tensor:
        return self.activation(self.up(without_padding(x, context)))


class GatedFFN(HiddenWidthFFN):
    """down(act(gate x) * up x), or another function of gate x and up x."""

    def __init__(self, config: GatedBaseConfig, d_model: int) -> None:
        super().__init__(config, d_model, config.gate_activation)
        width = config.width(d_model)
        self.gate = nn.Linear(d_model, width, bias=config.bias)
        self.up = nn.Linear(d_model, width, bias=config.bias)
        self.down = nn.Linear(width, d_model, bias=config.bias)

    def hidden(self, x: Tensor, context: TokenContext | None) -> Tensor:
        x = without_padding(x, context)
        gate, up = self.gate(x), self.up(x)
        gate_function = self.config.gate_function
        return self.activation(gate) * up if gate_function is None else gate_function(gate, up)


class ConvFFN(HiddenWidthFFN):
    """conv(act(conv(x))) over the positions of a sequence, with zero padding at its ends."""

    def __init__(self, config: ConvConfig, d_model: int) -> None:
        super().__init__(config, d_model, config.activation)
        width = config.width(d_model)
        self.up = _PositionConv(d_model, width, config)
        self.down = _PositionConv(width, d_model, config)

    def hidden(self, x: Tensor, context: TokenContext | None) -> Tensor:
        """(B, S, d_ff)"""
        x_TD, flat = flatten_tokens(x, context)
        x_BSD = rearrange(x_TD, "(b s) d -> b s d", s=flat.sequence_length)
        return self.activation(self.up(x_BSD, _by_sequence(flat)))

    def transform(self, x: Tensor, context: TokenContext | None) -> Tensor:
        hidden = self.dropout(self.hidden(x, context))
        _, flat = flatten_tokens(x, context)
        return self.down(hidden, _by_sequence(flat)).reshape(x.shape)

    @property
    def values_FD(self) -> Tensor:
        return self.down.weight_of_position().t()


def _by_sequence(flat: TokenContext) -> Tensor | None:
    """Return the mask of a flattened context as (B, S)."""
    if flat.mask is None:
        return None
    return rearrange(flat.mask, "(b s) -> b s", s=flat.sequence_length)


class _PositionConv(nn.Module):
    """A linear map of the window around each position; with kernel size 1, exactly an `nn.Linear`."""

    def __init__(self, d_in: int, d_out: int, config: ConvConfig) -> None:
        super().__init__()
        size = config.kernel_size
        self.linear = nn.Linear(size * d_in, d_out, bias=config.bias)
        num_later = 0 if config.causal else (size - 1) // 2
        self.padding = (size - 1 - num_later, num_later)
        self.kernel_size = size

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.kernel_size == 1:
            return self.linear(x)
        if mask is not None:  # real tokens must not read the values of padding
            x = x.masked_fill(~mask.unsqueeze(-1), 0)
        length = x.shape[-2]
        padded = F.pad(x, (0, 0, *self.padding))
        windows = [padded.narrow(-2, first, length) for first in range(self.kernel_size)]
        return self.linear(torch.cat(windows, dim=-1))

    def weight_of_position(self) -> Tensor:
        """Return the part of the weight, (out, in), that maps a position to itself."""
        d_in = self.linear.in_features // self.kernel_size
        return self.linear.weight.narrow(1, self.padding[0] * d_in, d_in)
