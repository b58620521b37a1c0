"""One layer of the decoder: attention, then a feed-forward block, each around a residual."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from torch import Tensor, nn

from moe_ffn.ffn.config import FFNConfig
from moe_ffn.model.attention import SelfAttention
from moe_ffn.model.config import DecoderConfig
from moe_ffn.model.positions import Positions
from moe_ffn.outputs import FFNOutput, TokenContext


class Block(nn.Module, ABC):
    """Holds the parts; the subclasses say where the norms stand."""

    def __init__(self, config: DecoderConfig, ffn: FFNConfig) -> None:
        super().__init__()
        self.attention = SelfAttention(config.attention, config.d_model, config.causal)
        self.attention_norm = config.norm.build(config.d_model)
        self.ffn = ffn.build(config.d_model)
        self.ffn_norm = config.norm.build(config.d_model)
        self.dropout = nn.Dropout(config.dropout)

    @abstractmethod
    def forward(self, x: Tensor, positions: Positions, context: TokenContext) -> FFNOutput:
        """The residual stream after this layer, and where its tokens were routed."""


class PreNormBlock(Block):
    """x + f(norm(x)): the stream itself is never normalised (Xiong et al. 2020)."""

    def forward(self, x: Tensor, positions: Positions, context: TokenContext) -> FFNOutput:
        x = x + self.dropout(self.attention(self.attention_norm(x), positions, context.mask))
        ffn = self.ffn(self.ffn_norm(x), context)
        return replace(ffn, hidden=x + self.dropout(ffn.hidden))


class PostNormBlock(Block):
    """norm(x + f(x)), as in Vaswani et al. 2017."""

    def forward(self, x: Tensor, positions: Positions, context: TokenContext) -> FFNOutput:
        attended = self.dropout(self.attention(x, positions, context.mask))
        x = self.attention_norm(x + attended)
        ffn = self.ffn(x, context)
        return replace(ffn, hidden=self.ffn_norm(x + self.dropout(ffn.hidden)))
