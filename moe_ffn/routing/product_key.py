"""Product keys, which find the k best of very many experts with two small tables of sub-keys.

T tokens, D model width, E experts, n = sqrt(E) sub-keys per table, H heads, Q width of a query, K experts per
head
"""

from __future__ import annotations

import math
from typing import Any, ClassVar, Literal

import torch
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn

from moe_ffn.config.base import MAX_COUNT, describe_options
from moe_ffn.config.sizes import linear_flops, linear_params
from moe_ffn.kernels.base import init_linear_, without_autocast
from moe_ffn.outputs import PairsOnlyRouting, Routing, TokenContext
from moe_ffn.routing.base import (
    Float32RMSNorm,
    MeanKConfig,
    Router,
    RouterLinear,
    RouterNormConfig,
    constant_weight_error,
    routing_of_pairs,
)


class ProductKeyRouterConfig(MeanKConfig, frozen=True):
    """Product keys: expert i * n + j has the key (c_i, c'_j), from two tables of n = sqrt(E) sub-keys.

    Lample et al. 2019, "Large Memory Layers with Product Keys" (arXiv:1907.05242), section 3: use
    `experts: value` and `keys: per_head`. PEER (He 2024, "Mixture of A Million Experts", arXiv:2407.04153):
    use `experts: single_neuron` and `keys: shared`. In Lample et al., 12 layers with a memory beat 24 layers
    without, at twice the speed of inference.

    Both papers normalise queries over the batch, which is not causal in training; `query_norm` normalises
    each query separately. No tensor has one entry per expert, so losses use the listed pairs.
    """

    is_pairs_only: ClassVar[bool] = True
    is_tokenwise: ClassVar[bool] = True

    type: Literal["product_key"] = "product_key"
    k: int = Field(default=2, ge=1, le=MAX_COUNT)
    """Experts per token and head; 16 in PEER, 32 in Lample et al."""
    num_heads: int = Field(default=1, ge=1, le=MAX_COUNT)
    """Queries per token, each of which chooses k experts; 8 in PEER, 4 in Lample et al. If several queries
    choose the same expert, their weights add up."""
    d_query: int = Field(default=128, ge=0, le=MAX_COUNT)
    """Width of a query; each table reads one half of it. With 0 both tables read the token itself (Doge)."""
    query_norm: RouterNormConfig | None = None
    """RMS norm of each query with a learned scale; none by default."""
    keys: Literal["shared", "per_head"] = "shared"
    """Sub-keys that all heads share (PEER), or separate ones per head (Lample et al.)."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """Function from the scores of a head's k experts to their weights."""

    @model_validator(mode="after")
    def _check_options(self) -> ProductKeyRouterConfig:
        if self.k == 1 and self.score == "softmax":
            raise constant_weight_error("score (softmax) with k (1)", "score: sigmoid or k >= 2")
        if self.d_query == 0:
            if self.query_norm is not None:
                raise ValueError(
                    "query_norm normalises queries, but with d_query (0) there are none; set query_norm to "
                    "null or d_query above 0"
                )
            if self.num_heads > 1 and self.keys == "shared":
                raise ValueError(
                    f"keys (shared) with d_query (0) make the {self.num_heads} heads choose the same "
                    "experts; set keys: per_head or num_heads: 1"
                )
        elif self.d_query % 2:
            raise ValueError(
                f"d_query ({self.d_query}) must be even, since each table of sub-keys reads half of a "
                f"query; use {self.d_query - 1} or {self.d_query + 1}"
            )
        return self

    def check_num_experts(self, num_experts: int) -> None:
        n = math.isqrt(num_experts)
        if n * n != num_experts:
            raise ValueError(
                f"router.type 'product_key' needs a square number of experts, got {num_experts}; use "
                f"{n * n} or {(n + 1) ** 2}"
            )
        if self.k > n:
            raise ValueError(
                f"router.k ({self.k}) must not exceed the {n} sub-keys of a table, the square root of "
                f"{num_experts} experts; lower router.k or use at least {self.k**2} experts"
            )

    def experts_per_token(self, num_experts: int) -> float:
        return self.num_heads * self.k

    @property
    def num_tables(self) -> int:
        """Number of pairs of tables."""
        return 1 if self.keys == "shared" else self.num_heads

    def num_params(self, d_model: int, num_experts: int) -> int:
        num_keys = self.num_tables * 2 * math.isqrt(num_experts)
        if self.d_query == 0:
            return num_keys * d_model
        queries = linear_params(d_model, self.num_heads * self.d_query, bias=False)
        norm = 0 if self.query_norm is None else self.d_query
        return queries + norm + num_keys * (self.d_query // 2)

    def flops_per_token(self, d_model: int, num_experts: int) -> int:
        num_scores = self.num_heads * 2 * math.isqrt(num_experts)
        if self.d_query == 0:
            return linear_flops(d_model, num_scores)
        queries = linear_flops(d_model, self.num_heads * self.d_query)
        return queries + linear_flops(self.d_query // 2, num_scores)

    def build(self, d_model: int, num_experts: int) -> Router:
        return ProductKeyRouter(self, d_model, num_experts)

    def describe(self) -> str:
        return f"{self.type} k={self.num_heads}x{self.k}"


class ProductKeyRouter(Router):
    """s_ij = q_1 . c_i + q_2 . c'_j; the k largest of all n^2 scores are chosen, weighted by their softmax.

    They are sums of one of the k largest q_1 . c_i and one of the k largest q_2 . c'_j, so k^2 + 2 n numbers
    are compared instead of n^2 (arXiv:1907.05242, section 3.2). Each head has its own query q = norm(W x).
    """

    def __init__(self, config: ProductKeyRouterConfig, d_model: int, num_experts: int) -> None:
        super().__init__()
        self.config: Any = config
        self.num_experts = num_experts
        width, self.query, self.query_norm = d_model, None, None
        if config.d_query:
            width = config.d_query // 2
            self.query = RouterLinear(d_model, config.num_heads * config.d_query)
            if config.query_norm is not None:
                self.query_norm = Float32RMSNorm(config.d_query, config.query_norm.eps)
        n = math.isqrt(num_experts)
        self.sub_keys = nn.Parameter(torch.empty(config.num_tables, 2, n, width))
        init_linear_(self.sub_keys)

    def scores_of_halves(self, x_TD: Tensor) -> Tensor:
        """Return the scores of the sub-keys in both tables, (T, H, 2, n), float32 or wider."""
        dtype = RouterLinear.dtype_for(x_TD)
        keys_H2nQ, num_heads = self.sub_keys.to(dtype), self.config.num_heads
        with without_autocast(x_TD):
            if self.query is None:
                return torch.einsum("td,hpnd->thpn", x_TD.to(dtype), keys_H2nQ)
            query_THQ = rearrange(self.query(x_TD), "t (h q) -> t h q", h=num_heads)
            if self.query_norm is not None:
                query_THQ = self.query_norm(query_THQ)
            halves_TH2Q = rearrange(query_THQ, "t h (p q) -> t h p q", p=2)
            if len(keys_H2nQ) == 1:
                return torch.einsum("thpq,pnq->thpn", halves_TH2Q, keys_H2nQ[0])
            return torch.einsum("thpq,hpnq->thpn", halves_TH2Q, keys_H2nQ)

    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        k, num_sub_keys = self.config.k, self.sub_keys.shape[2]
        best_TH2K, ids_TH2K = self.scores_of_halves(x_TD).topk(k, dim=-1)
        first_THK, second_THK = best_TH2K.unbind(dim=2)
        sums_THKK = first_THK.unsqueeze(-1) + second_THK.unsqueeze(-2)
        logits_THK, index_THK = sums_THKK.flatten(-2).topk(k, dim=-1)
        first_ids_THK, second_ids_THK = ids_TH2K.unbind(dim=2)
        ids_THK = first_ids_THK.gather(-1, index_THK // k) * num_sub_keys
        ids_THK = ids_THK + second_ids_THK.gather(-1, index_THK % k)
        is_softmax = self.config.score == "softmax"
        weights_THK = logits_THK.softmax(dim=-1) if is_softmax else logits_THK.sigmoid()
        return routing_of_pairs(
            weights_THK.flatten(1),
            ids_THK.flatten(1),
            None,
            None,
            context,
            num_experts=self.num_experts,
            kind=PairsOnlyRouting,
            logits_N=logits_THK.flatten(),
            pairs_per_token=ids_THK.flatten(1).shape[1],
        )

    def extra_repr(self) -> str:
        options = describe_options(self.config, without=["type", "query_norm"])
        return f"num_experts={self.num_experts}, {options}"
