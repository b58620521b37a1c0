"""A feed-forward block that also sees neighbouring positions.

T tokens, B sequences, S tokens of a sequence, D model width
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn

from moe_ffn.activations import Activation, activation_function
from moe_ffn.config import MAX_COUNT, describe_options
from moe_ffn.errors import Refusal
from moe_ffn.ffn.base import FFNBlock
from moe_ffn.ffn.dense import HiddenWidthConfig
from moe_ffn.outputs import FFNOutput, TokenContext, check_dtype, check_input, flatten_tokens
from moe_ffn.sizes import linear_flops, linear_params


class ConvConfig(HiddenWidthConfig, frozen=True):
    """Two 1-D convolutions over positions; with kernel size 1 it is the dense block.

    Vaswani et al. 2017, section 3.3: "another way of describing this is as two convolutions with
    kernel size 1".
    """

    type: Literal["conv"] = "conv"
    kernel_size: int = Field(default=3, ge=1, le=MAX_COUNT)
    """Positions each convolution sees."""
    causal: bool = True
    """Look back only. False centres the kernel, which a causal model refuses."""
    activation: Activation = "gelu"
    """Element-wise function between the two convolutions."""

    @property
    def not_causal_because(self) -> Refusal | None:
        if self.causal or self.kernel_size == 1:
            return None
        return Refusal(
            f"causal (false) with kernel_size ({self.kernel_size}) looks ahead", "set it to true"
        )

    def build(self, d_model: int) -> FFNBlock:
        return ConvFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        width, k = self.width(d_model), self.kernel_size
        up = linear_params(k * d_model, width, self.bias)
        return up + linear_params(k * width, d_model, self.bias)

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        return 2 * linear_flops(self.kernel_size * d_model, self.width(d_model))


class ConvFFN(FFNBlock):
    """conv(act(conv(x))), over the positions of a sequence; what lies beyond it is zero."""

    def __init__(self, config: ConvConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model
        width = config.width(d_model)
        self.up = _PositionConv(d_model, width, config)
        self.down = _PositionConv(width, d_model, config)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = activation_function(config.activation)

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model)
        check_dtype(x, next(self.parameters(), None))
        x_TD, flat = flatten_tokens(x, context)
        x_BSD = rearrange(x_TD, "(b s) d -> b s d", s=flat.sequence_length)
        mask_BS = flat.mask
        if mask_BS is not None:
            mask_BS = rearrange(mask_BS, "(b s) -> b s", s=flat.sequence_length)
        hidden = self.dropout(self.activation(self.up(x_BSD, mask_BS)))
        return FFNOutput(self.down(hidden, mask_BS).reshape(x.shape).to(x.dtype))

    def extra_repr(self) -> str:
        sizes = f"d_model={self.d_model}, d_ff={self.config.width(self.d_model)}"
        return f"{sizes}, {describe_options(self.config, without=['d_ff', 'bias', 'dropout'])}"


class _PositionConv(nn.Module):
    """A 1-D convolution as a linear map of the window before each position.

    For one position it is the very product of `nn.Linear`, so kernel size 1 is the dense block to
    the last bit, and the axes stay as every other block has them.
    """

    def __init__(self, d_in: int, d_out: int, config: ConvConfig) -> None:
        super().__init__()
        size = config.kernel_size
        self.linear = nn.Linear(size * d_in, d_out, bias=config.bias)
        after = 0 if config.causal else (size - 1) // 2
        self.padding = (size - 1 - after, after)
        self.kernel_size = size

    def forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        if self.kernel_size == 1:
            return self.linear(x)
        if mask is not None:  # a real token must not see what stands in the padding
            x = x.masked_fill(~mask.unsqueeze(-1), 0)
        length = x.shape[-2]
        padded = F.pad(x, (0, 0, *self.padding))
        windows = [padded.narrow(-2, first, length) for first in range(self.kernel_size)]
        return self.linear(torch.cat(windows, dim=-1))
