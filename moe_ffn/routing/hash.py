"""Hash routing: experts are a fixed function of the token id.

T tokens, D model width, E experts, K experts per token
"""

from __future__ import annotations

from typing import ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from moe_ffn.config.base import MAX_COUNT, describe_options
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing.base import MeanKConfig, Router, RouterLinear, routing_of_pairs


class HashRouterConfig(MeanKConfig, frozen=True):
    """Hash: the token id decides; nothing is learned (Roller et al. 2021, arXiv:2106.04426)."""

    type: Literal["hash"] = "hash"
    k: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Experts per token, all different, each with weight 1 / k."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Seed of the hash function."""

    learns: ClassVar[bool] = False
    is_tokenwise: ClassVar[bool] = True

    def num_params(self, d_model: int, num_experts: int) -> int:
        return 0

    def flops_per_token(self, d_model: int, num_experts: int) -> int:
        return 0

    def build(self, d_model: int, num_experts: int) -> Router:
        return HashRouter(self, num_experts)


class HashRouter(Router):
    """The k experts of a token are h, h + 1, ..., h + k - 1 modulo E, with the hash h of its id."""

    def __init__(self, config: HashRouterConfig, num_experts: int) -> None:
        super().__init__()
        self.config = config
        self.num_experts = num_experts

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        """Return scores 1/k for chosen experts, and logits 0, or NaN for tokens with NaN or infinity, which
        the metric `nonfinite_tokens` counts; ValueError if the context has no token ids.
        """
        if context.token_ids is None:
            raise ValueError(
                "router.type 'hash' routes by token id: call the block with "
                "TokenContext(token_ids=...)"
            )
        k, device = self.config.k, x_TD.device
        first_T1 = hash_of(context.token_ids, self.config.seed).unsqueeze(-1)
        expert_ids_TK = (first_T1 + torch.arange(k, device=device)) % self.num_experts
        dtype = RouterLinear.dtype_for(x_TD)
        scores_TE = torch.zeros(x_TD.shape[0], self.num_experts, dtype=dtype, device=device)
        weights_TK = torch.full_like(expert_ids_TK, 1 / k, dtype=dtype)
        scores_TE.scatter_(1, expert_ids_TK, weights_TK)
        finite_T1 = x_TD.isfinite().all(dim=-1, keepdim=True)
        logits_TE = torch.zeros_like(scores_TE).masked_fill(~finite_T1, torch.nan)
        return routing_of_pairs(weights_TK, expert_ids_TK, logits_TE, scores_TE, context)

    def extra_repr(self) -> str:
        options = describe_options(self.config, without=["type"])
        return f"num_experts={self.num_experts}, {options}"


def hash_of(ids: Tensor, seed: int) -> Tensor:
    """Return a non-negative int64 hash of each id, by the 32-bit finaliser of MurmurHash3."""
    # int32 would overflow, so that int32 ids would get other experts than int64 ids.
    h = (ids.long() + 0x9E3779B1 * (seed + 1)) & 0xFFFFFFFF
    for multiplier, shift in ((0x85EBCA6B, 16), (0xC2B2AE35, 13)):
        h = ((h ^ (h >> shift)) * multiplier) & 0xFFFFFFFF
    return h ^ (h >> 16)
