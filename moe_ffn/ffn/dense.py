"""The dense block of the original Transformer."""

from __future__ import annotations

from torch import Tensor, nn

from moe_ffn.activations import activation_function
from moe_ffn.ffn.base import FFNBlock
from moe_ffn.ffn.dense_config import DenseConfig
from moe_ffn.outputs import FFNOutput, TokenContext, check_dtype, check_input, without_padding


class DenseFFN(FFNBlock):
    """down(act(up x))."""

    def __init__(self, config: DenseConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model
        self.up = nn.Linear(d_model, config.width(d_model), bias=config.bias)
        self.down = nn.Linear(config.width(d_model), d_model, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = activation_function(config.activation)

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model)
        check_dtype(x, next(self.parameters(), None))
        x = without_padding(x, context)
        hidden = self.down(self.dropout(self.activation(self.up(x))))
        return FFNOutput(hidden.to(x.dtype))

    def extra_repr(self) -> str:
        sizes = f"d_model={self.d_model}, d_ff={self.config.width(self.d_model)}"
        return f"{sizes}, activation={self.config.activation}"
