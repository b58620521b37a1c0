"""Experts in a space narrower than the model's, between a projection into it and one out of it."""

from __future__ import annotations

from pydantic import Field
from torch import Tensor, nn

from moe_ffn.config.base import MAX_COUNT, Config
from moe_ffn.config.sizes import linear_flops, linear_params
from moe_ffn.kernels.base import check_dtype


class LatentConfig(Config, frozen=True):
    """Experts in a narrower space: y = W_out sum_i w_i E_i(W_in x); router and shared expert read x.

    LatentMoE (Elango et al. 2026, arXiv:2601.18089), tried up to 95 B parameters and 1 T tokens; Nemotron 3.
    Weights of an expert, and tokens that ranks exchange, are d_model / width times smaller: that many times
    the experts, and experts per token, cost the same but for the two projections.
    """

    width: int = Field(ge=1, le=MAX_COUNT)
    """Width of the space: the d_model that the experts are built with."""
    bias: bool = False
    """Add a bias to both projections."""

    def num_params(self, d_model: int) -> int:
        into = linear_params(d_model, self.width, self.bias)
        return into + linear_params(self.width, d_model, self.bias)

    def flops_per_token(self, d_model: int) -> int:
        return 2 * linear_flops(d_model, self.width)


class Latent(nn.Module):
    """The two projections around experts in a narrower space."""

    def __init__(self, config: LatentConfig, d_model: int) -> None:
        super().__init__()
        self.into = nn.Linear(d_model, config.width, config.bias)
        self.out_of = nn.Linear(config.width, d_model, config.bias)

    def narrowed(self, x_TD: Tensor) -> Tensor:
        """`x_TD` in the space of the experts.

        Raises:
            ValueError: `x_TD` has another dtype than the weights, without autocast.
        """
        check_dtype(x_TD, self.into.weight)
        return self.into(x_TD)
