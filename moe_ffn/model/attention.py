"""Self-attention with grouped-query heads.

B batch, H heads, S sequence, D model width, d head width
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn

from moe_ffn.config import MAX_COUNT, Config
from moe_ffn.model.norm import NormConfig
from moe_ffn.model.positions import Positions
from moe_ffn.sizes import linear_flops, linear_params


class AttentionConfig(Config, frozen=True):
    """Self-attention; fewer key-value heads than query heads is grouped-query attention."""

    num_heads: int = Field(default=4, ge=1, le=MAX_COUNT)
    """Query heads; must divide d_model, unless head_dim is given."""
    num_kv_heads: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Key and value heads, shared by groups of query heads; num_heads by default."""
    head_dim: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Width of a head; d_model / num_heads by default."""
    norm_qk: Literal["head", "all"] | None = None
    """Normalise queries and keys by the model's `norm` before they are rotated: each head by itself (Qwen3,
    arXiv:2505.09388), or all heads together (OLMoE, arXiv:2409.02060)."""
    bias: bool = False
    """Add a bias to the four projections."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping an attention weight, in training."""

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @model_validator(mode="after")
    def _check_groups(self) -> AttentionConfig:
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads ({self.kv_heads}) must divide num_heads ({self.num_heads})"
            )
        return self

    def head_width(self, d_model: int) -> int:
        return self.head_dim or d_model // self.num_heads

    def widths(self, d_model: int) -> tuple[int, int]:
        """Of all queries, and of all keys or values."""
        head_dim = self.head_width(d_model)
        return self.num_heads * head_dim, self.kv_heads * head_dim

    def normed_widths(self, d_model: int) -> tuple[int, ...]:
        """Of the norm of queries and of that of keys; empty where there are none."""
        widths = {None: (), "head": 2 * (self.head_width(d_model),), "all": self.widths(d_model)}
        return widths[self.norm_qk]

    def num_params(self, d_model: int, norm: NormConfig) -> int:
        d_query, d_kv = self.widths(d_model)
        projections = linear_params(d_model, d_query, self.bias)
        projections += 2 * linear_params(d_model, d_kv, self.bias)
        projections += linear_params(d_query, d_model, self.bias)
        return projections + sum(map(norm.num_params, self.normed_widths(d_model)))

    def flops_per_token(self, d_model: int, seq_len: int, causal: bool = True) -> int:
        """Forward FLOPs per token; in a causal sequence it attends to (seq_len + 1) / 2 on average."""
        d_query, d_kv = self.widths(d_model)
        projections = 2 * linear_flops(d_model, d_query) + 2 * linear_flops(d_model, d_kv)
        attended = (seq_len + 1) / 2 if causal else seq_len
        return projections + round(4 * d_query * attended)


class SelfAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v over the tokens up to each one, or over all if not causal."""

    def __init__(
        self, config: AttentionConfig, d_model: int, causal: bool, norm: NormConfig
    ) -> None:
        super().__init__()
        self.causal = causal
        self.num_heads = config.num_heads
        self.num_kv_heads = config.kv_heads
        self.dropout = config.dropout
        self.norms_heads = config.norm_qk == "head"
        d_query, d_kv = config.widths(d_model)
        self.query = nn.Linear(d_model, d_query, bias=config.bias)
        self.key = nn.Linear(d_model, d_kv, bias=config.bias)
        self.value = nn.Linear(d_model, d_kv, bias=config.bias)
        self.output = nn.Linear(d_query, d_model, bias=config.bias)
        self.query_norm = self.key_norm = None
        if widths := config.normed_widths(d_model):
            self.query_norm, self.key_norm = map(norm.build, widths)

    def forward(self, x_BSD: Tensor, positions: Positions, mask_BS: Tensor | None) -> Tensor:
        """Mix each token's values with those of the tokens before it.

        Args:
            positions: rotates queries and keys, if they are rotary ones.
            mask_BS: True for real tokens; no token attends to padding, but padding to itself.
        """
        query = self._heads(self.query(x_BSD), self.num_heads, self.query_norm)
        key = self._heads(self.key(x_BSD), self.num_kv_heads, self.key_norm)
        value = rearrange(self.value(x_BSD), "b s (h d) -> b h s d", h=self.num_kv_heads)
        mixed = F.scaled_dot_product_attention(
            positions.rotate(query),
            positions.rotate(key),
            value,
            attn_mask=None if mask_BS is None else attention_mask(mask_BS, self.causal),
            is_causal=self.causal and mask_BS is None,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=self.num_kv_heads != self.num_heads,
        )
        return self.output(rearrange(mixed, "b h s d -> b s (h d)"))

    def _heads(self, x_BSD: Tensor, num_heads: int, norm: nn.Module | None) -> Tensor:
        if norm is not None and not self.norms_heads:
            x_BSD = norm(x_BSD)
        x_BHSd = rearrange(x_BSD, "b s (h d) -> b h s d", h=num_heads)
        return norm(x_BHSd) if norm is not None and self.norms_heads else x_BHSd


def attention_mask(mask_BS: Tensor, causal: bool) -> Tensor:
    """The tokens that each token may attend to, bool (B, 1, S, S).

    Every token may attend to itself, so that the row of a padded token is no softmax over nothing.
    """
    length = mask_BS.shape[-1]
    seen = torch.ones(length, length, dtype=torch.bool, device=mask_BS.device)
    itself = torch.eye(length, dtype=torch.bool, device=mask_BS.device)
    allowed = ((seen.tril() if causal else seen) & mask_BS[:, None, :]) | itself
    return allowed[:, None]
