"""A feed-forward block that also sees neighbouring positions.

T tokens, B sequences, S tokens of a sequence, D model width
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor, nn

from moe_ffn.activations import activation_function
from moe_ffn.ffn.base import FFNBlock
from moe_ffn.ffn.dense_config import ConvConfig
from moe_ffn.outputs import FFNOutput, TokenContext, check_dtype, check_input, flatten_tokens


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
        config = self.config
        sizes = f"d_model={self.d_model}, d_ff={config.width(self.d_model)}"
        window = f"kernel_size={config.kernel_size}, causal={config.causal}"
        return f"{sizes}, {window}, activation={config.activation}"


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
