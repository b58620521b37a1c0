"""Gated linear units: SwiGLU and its relatives."""

from __future__ import annotations

from torch import Tensor, nn

from moe_ffn.activations import GATE_ACTIVATIONS, activation_function
from moe_ffn.ffn.base import FFNBlock
from moe_ffn.ffn.dense_config import GatedConfig
from moe_ffn.outputs import FFNOutput, TokenContext, check_dtype, check_input, without_padding


class GatedFFN(FFNBlock):
    """down(act(gate x) * up x)."""

    def __init__(self, config: GatedConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model
        width = config.width(d_model)
        self.gate = nn.Linear(d_model, width, bias=config.bias)
        self.up = nn.Linear(d_model, width, bias=config.bias)
        self.down = nn.Linear(width, d_model, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = activation_function(GATE_ACTIVATIONS[config.type])

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model)
        check_dtype(x, next(self.parameters(), None))
        x = without_padding(x, context)
        hidden = self.down(self.dropout(self.activation(self.gate(x)) * self.up(x)))
        return FFNOutput(hidden.to(x.dtype))

    def extra_repr(self) -> str:
        sizes = f"d_model={self.d_model}, d_ff={self.config.width(self.d_model)}"
        activation = GATE_ACTIVATIONS[self.config.type]
        return f"{sizes}, activation={activation}, type={self.config.type}"
