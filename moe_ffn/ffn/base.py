"""The one interface of every feed-forward block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING

from torch import Tensor, nn

from moe_ffn.outputs import FFNOutput, TokenContext
from moe_ffn.routing.base import Router


class FFNBlock(nn.Module, ABC):
    """Maps (..., d_model) to (..., d_model), and says where the tokens went.

    Nothing observed is kept on the module: what a caller wants to know is in the output.
    """

    if TYPE_CHECKING:

        def __call__(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput: ...

    @abstractmethod
    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        """Transform each token.

        Args:
            x: (batch, seq, d_model), or any (..., d_model), of the weights' dtype or under autocast.
            context: padding mask and token ids, for the blocks that need them; see `TokenContext`.

        Returns:
            hidden, of the shape and dtype of `x`, and the routing, None for a dense block.

        Raises:
            TypeError, ValueError: `x` or `context` does not fit, in one sentence; see `check_input` and
                `check_dtype` in `moe_ffn.outputs`, which a block of one's own may call too.

        """

    def routers(self) -> dict[str, Router]:
        """The routers behind the Routings that this block returns, under their names in `FFNOutput`."""
        return {}
