"""What the config of every feed-forward block is; torch-free (see `moe_ffn.config`)."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, ClassVar

from moe_ffn.config import TaggedConfig

if TYPE_CHECKING:
    from moe_ffn.ffn.base import FFNBlock
    from moe_ffn.routing.base_config import RouterConfig


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
