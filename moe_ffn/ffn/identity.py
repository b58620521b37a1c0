"""No feed-forward block at all."""

from __future__ import annotations

from torch import Tensor

from moe_ffn.ffn.base import FFNBlock
from moe_ffn.outputs import FFNOutput, TokenContext, check_input


class IdentityFFN(FFNBlock):
    """Contributes zero, so that around a residual connection the sublayer is the identity."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model)
        # A plain zero would leave the norm before it without a gradient, and DDP would hang.
        return FFNOutput(x * 0)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}"
