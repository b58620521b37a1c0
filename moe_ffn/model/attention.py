"""Self-attention with grouped-query heads.

B batch, H heads, S sequence, D model width, d head width
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn

from moe_ffn.config import MAX_COUNT, Config
from moe_ffn.model.positions import Positions
from moe_ffn.sizes import linear_flops, linear_params


class AttentionConfig(Config, frozen=True):
    """Self-attention; fewer key-value heads than query heads is grouped-query attention."""

    num_heads: int = Field(default=4, ge=1, le=MAX_COUNT)
    """Query heads; must divide d_model."""
    num_kv_heads: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Key and value heads, shared by groups of query heads; num_heads by default."""
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

    def num_params(self, d_model: int) -> int:
        d_kv = d_model // self.num_heads * self.kv_heads
        query_and_output = 2 * linear_params(d_model, d_model, self.bias)
        return query_and_output + 2 * linear_params(d_model, d_kv, self.bias)

    def flops_per_token(self, d_model: int, seq_len: int, causal: bool = True) -> int:
        """Forward FLOPs per token; in a causal sequence it attends to (seq_len + 1) / 2 on average."""
        d_kv = d_model // self.num_heads * self.kv_heads
        projections = 2 * linear_flops(d_model, d_model) + 2 * linear_flops(d_model, d_kv)
        attended = (seq_len + 1) / 2 if causal else seq_len
        return projections + round(4 * d_model * attended)


class SelfAttention(nn.Module):
    """softmax(q k^T / sqrt(d)) v over the tokens up to each one, or over all if not causal."""

    def __init__(self, config: AttentionConfig, d_model: int, causal: bool) -> None:
        super().__init__()
        self.causal = causal
        self.num_heads = config.num_heads
        self.num_kv_heads = config.kv_heads
        self.dropout = config.dropout
        d_kv = d_model // config.num_heads * config.kv_heads
        self.query = nn.Linear(d_model, d_model, bias=config.bias)
        self.key = nn.Linear(d_model, d_kv, bias=config.bias)
        self.value = nn.Linear(d_model, d_kv, bias=config.bias)
        self.output = nn.Linear(d_model, d_model, bias=config.bias)

    def forward(self, x_BSD: Tensor, positions: Positions, mask_BS: Tensor | None) -> Tensor:
        """Mix each token's values with those of the tokens before it.

        Args:
            positions: rotates queries and keys, if they are rotary ones.
            mask_BS: True for real tokens; no token attends to padding, but padding to itself.
        """
        query = rearrange(self.query(x_BSD), "b s (h d) -> b h s d", h=self.num_heads)
        key = rearrange(self.key(x_BSD), "b s (h d) -> b h s d", h=self.num_kv_heads)
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


def attention_mask(mask_BS: Tensor, causal: bool) -> Tensor:
    """The tokens that each token may attend to, bool (B, 1, S, S).

    Every token may attend to itself, so that the row of a padded token is no softmax over nothing.
    """
    length = mask_BS.shape[-1]
    seen = torch.ones(length, length, dtype=torch.bool, device=mask_BS.device)
    itself = torch.eye(length, dtype=torch.bool, device=mask_BS.device)
    allowed = ((seen.tril() if causal else seen) & mask_BS[:, None, :]) | itself
    return allowed[:, None]
