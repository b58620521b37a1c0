"""No feed-forward block at all."""

from __future__ import annotations

from torch import Tensor

from moe_ffn.ffn.base import FFNBlock
from moe_ffn.outputs import FFNOutput, TokenContext


class IdentityFFN(FFNBlock):
    """Contributes zero, so that around a residual connection the sublayer is the identity."""

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        # A plain zero would leave the norm before it without a gradient, and DDP would hang.
        return FFNOutput(x * 0)
