"""The causal Transformer decoder; of the feed-forward it knows only `FFNBlock`.

B batch, S sequence, V vocabulary
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from moe_ffn.model.block import PostNormBlock, PreNormBlock
from moe_ffn.model.config import DecoderConfig
from moe_ffn.outputs import Routing, TokenContext


@dataclass(frozen=True)
class DecoderOutput:
    """What the decoder predicts, and where its tokens went."""

    logits: Tensor
    """(B, S, V), scores of the next token at each position."""

    routings: dict[int, Routing]
    """For each sparse layer, by its index, where the tokens went."""


torch.export.register_dataclass(DecoderOutput)


class Decoder(nn.Module):
    """Embeddings, `num_layers` blocks, and an output matrix."""

    def __init__(self, config: DecoderConfig, vocab_size: int, max_seq_len: int) -> None:
        super().__init__()
        self.config = config
        self.max_seq_len = max_seq_len
        self.embedding = nn.Embedding(vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.embedding_scale = math.sqrt(config.d_model) if config.scale_embeddings else 1.0
        self.positions = config.positions.build(config.d_model, config.head_dim, max_seq_len)
        self.dropout = nn.Dropout(config.dropout)
        block = {"pre": PreNormBlock, "post": PostNormBlock}[config.norm_placement]
        self.layers = nn.ModuleList(block(config, ffn) for ffn in config.layer_ffns())
        # A post-norm stream leaves its last block normalised.
        pre_norm = config.norm_placement == "pre"
        self.final_norm = config.norm.build(config.d_model) if pre_norm else nn.Identity()
        self.unembedding = nn.Linear(config.d_model, vocab_size, bias=False)
        nn.init.normal_(self.unembedding.weight, std=0.02)
        if config.tie_embeddings:
            self.unembedding.weight = self.embedding.weight

    def forward(self, token_ids: Tensor, mask: Tensor | None = None) -> DecoderOutput:
        """Next-token logits at every position.

        Args:
            token_ids: int64 (B, S), S at most `max_seq_len`.
            mask: bool (B, S), True for real tokens; None when all are.

        Raises:
            ValueError: the sequence is longer than `max_seq_len`.
        """
        if token_ids.shape[-1] > self.max_seq_len:
            raise ValueError(
                f"the sequence has {token_ids.shape[-1]} tokens, but the model was built for "
                f"max_seq_len ({self.max_seq_len})"
            )
        context = TokenContext(mask=mask, token_ids=token_ids)
        x = self.positions.embed(self.embedding(token_ids) * self.embedding_scale)
        x = self.dropout(x)
        routings: dict[int, Routing] = {}
        for index, layer in enumerate(self.layers):
            output = layer(x, self.positions, context)
            x = output.hidden
            if output.routing is not None:
                routings[index] = output.routing
        return DecoderOutput(self.unembedding(self.final_norm(x)), routings)
