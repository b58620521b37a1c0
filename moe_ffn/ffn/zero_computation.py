"""Experts without a network: zero, copy and constant.

T tokens, D model width, N (token, expert) pairs, Z experts without a network, C constant experts
"""

from __future__ import annotations

import torch
from einops import einsum, rearrange
from pydantic import Field
from torch import Tensor, nn

from moe_ffn.config.base import MAX_COUNT, Config, describe_options
from moe_ffn.config.sizes import linear_flops, linear_params
from moe_ffn.kernels.base import init_linear_
from moe_ffn.outputs import Routing


class ZeroComputationConfig(Config, frozen=True):
    """Experts without a network, which the router can choose like other experts, at almost no cost.

    MoE++ (Jin et al. 2024, arXiv:2410.07348); the copy expert is LongCat-Flash's identity expert.
    """

    num_zero: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Number of experts that return 0."""
    num_copy: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Number of experts that return the token unchanged."""
    num_constant: int = Field(default=0, ge=0, le=MAX_COUNT)
    """Number of experts that mix the token with a learned vector."""

    @property
    def total(self) -> int:
        return self.num_zero + self.num_copy + self.num_constant

    def kinds(self) -> list[str]:
        """Return the kind of each expert, ordered by expert id."""
        return ["zero"] * self.num_zero + ["copy"] * self.num_copy + ["const"] * self.num_constant

    def num_params(self, d_model: int) -> int:
        return self.num_constant * (d_model + linear_params(d_model, 2, bias=False))

    def flops_per_token(self, d_model: int) -> int:
        mixing = self.num_constant * linear_flops(d_model, 2)
        return mixing + linear_flops(self.num_constant, d_model)


class ZeroComputationExperts(nn.Module):
    """zero(x) = 0, copy(x) = x, constant(x) = a_1 x + a_2 v, a = softmax(W x) (arXiv:2410.07348)."""

    def __init__(self, config: ZeroComputationConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.num_zero = config.num_zero
        self.num_copy = config.num_copy
        self.vector_CD = self.mix_C2D = None
        if config.num_constant:
            self.vector_CD = nn.Parameter(torch.empty(config.num_constant, d_model))
            self.mix_C2D = nn.Parameter(torch.empty(config.num_constant, 2, d_model))
            init_linear_(self.vector_CD)
            init_linear_(self.mix_C2D)

    def forward(self, x_TD: Tensor, routing: Routing, first: int) -> Tensor:
        """Return the weighted sum of the experts without a network, (T, D); their ids begin at `first`."""
        weights_TZ = weights_of_pairs(routing, first)
        copies = weights_TZ[:, self.num_zero : self.num_zero + self.num_copy]
        y_TD = copies.sum(dim=-1, keepdim=True) * x_TD
        if self.vector_CD is not None and self.mix_C2D is not None:
            weights_TC = weights_TZ[:, self.num_zero + self.num_copy :]
            mix_TC2 = einsum(x_TD, self.mix_C2D, "t d, c m d -> t c m").softmax(dim=-1)
            shares_TC2 = weights_TC.unsqueeze(-1) * mix_TC2
            token_TD = shares_TC2[..., 0].sum(dim=-1, keepdim=True) * x_TD
            y_TD = y_TD + token_TD + shares_TC2[..., 1] @ self.vector_CD.to(shares_TC2.dtype)
        return y_TD.to(x_TD.dtype)

    def extra_repr(self) -> str:
        return describe_options(self.config)


def weights_of_pairs(routing: Routing, first: int) -> Tensor:
    """Return each token's weights for the experts from id `first` on, (T, Z); 0 for pairs not computed."""
    num_zero_computation = routing.num_experts - first
    skipped_N = routing.uncomputed_N | (routing.expert_ids_N < first)
    cell_N = routing.token_indices_N * num_zero_computation + (routing.expert_ids_N - first)
    weights_N = routing.weights_N.masked_fill(skipped_N, 0)
    flat = weights_N.new_zeros(routing.num_tokens * num_zero_computation)
    flat = flat.index_add(0, cell_N.masked_fill(skipped_N, 0), weights_N)
    return rearrange(flat, "(t z) -> t z", z=num_zero_computation)
