"""The one interface of every feed-forward block."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, ClassVar

from torch import Tensor, nn

from moe_ffn.config import TaggedConfig
from moe_ffn.outputs import FFNOutput, TokenContext
from moe_ffn.routing.base import Router, RouterConfig


class FFNConfig(TaggedConfig, frozen=True):
    """One feed-forward block, and what it costs.

    A block of your own subclasses this in a file of your own, defines `build`, `num_params` and
    `flops_per_token`, and is named in YAML as `type: my_module:MyConfig`.
    """

    is_sparse: ClassVar[bool] = False
    """True where each token uses a part of the parameters, so that the block returns a Routing."""

    @property
    def not_causal_because(self) -> str | None:
        """Why a token's output may depend on later tokens, and what to use instead; None if causal."""
        return None

    @property
    def is_causal(self) -> bool:
        return self.not_causal_because is None

    def routers(self) -> dict[str, tuple[RouterConfig, int]]:
        """The routers of the block, named as in `FFNOutput`, and what each has to choose from."""
        return {}

    @abstractmethod
    def build(self, d_model: int) -> FFNBlock: ...

    @abstractmethod
    def num_params(self, d_model: int) -> int: ...

    def num_active_params(self, d_model: int) -> int:
        """Parameters that one token passes through, on average."""
        return self.num_params(d_model)

    @abstractmethod
    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        """Forward FLOPs of the matrix products for one token of a sequence of `seq_len`.

        Training costs three times that.
        """

    def describe(self) -> str:
        """A few words for tables."""
        return self.type


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
