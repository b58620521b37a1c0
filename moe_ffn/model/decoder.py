"""The Transformer; of the feed-forward it knows only `FFNBlock`.

B batch, S sequence, V vocabulary
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from moe_ffn.config import require_count
from moe_ffn.layer_names import layer_names
from moe_ffn.model.block import Block, PostNormBlock, PreNormBlock
from moe_ffn.model.config import DecoderConfig
from moe_ffn.outputs import FFNOutput, Routing, TokenContext, brief

if TYPE_CHECKING:
    from moe_ffn.routing.base import Router


@dataclass(frozen=True)
class DecoderOutput:
    """What the decoder predicts, and where its tokens went."""

    logits: Tensor
    """(B, S, V), scores of the next token at each position; of the token itself, if not causal."""

    routings: dict[str, Routing]
    """Where the tokens went, for each sparse layer: `layer_03`, and `layer_03/inner` for a sparse block
    inside a mixture of depths."""

    def __repr__(self) -> str:
        names = list(self.routings)
        if len(names) > 4:
            names = [*names[:2], "...", names[-1]]
        routings = f"{len(self.routings)} routings: {', '.join(names)}" if names else "no routings"
        return f"{type(self).__name__}(logits={brief(self.logits)}, {routings})"


torch.export.register_dataclass(DecoderOutput)


class Decoder(nn.Module):
    """Embeddings, `num_layers` blocks, and an output matrix."""

    def __init__(self, config: DecoderConfig, vocab_size: int, max_seq_len: int) -> None:
        super().__init__()
        require_count(vocab_size, "vocab_size")
        require_count(max_seq_len, "max_seq_len")
        self.config = config
        self.max_seq_len = max_seq_len
        self.embedding = nn.Embedding(vocab_size, config.d_model)
        nn.init.normal_(self.embedding.weight, std=0.02)
        self.mask_token_id = vocab_size
        self.mask_embedding = None
        if not config.causal:
            self.mask_embedding = nn.Parameter(torch.empty(config.d_model))
            nn.init.normal_(self.mask_embedding, std=0.02)
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
        """Logits over the vocabulary at every position.

        Args:
            token_ids: integers (B, S), S at most `max_seq_len`; a model that is not causal also takes
                `mask_token_id`, which stands behind the vocabulary.
            mask: bool (B, S), True for real tokens; None when all are.

        Raises:
            TypeError, ValueError: a shape or a dtype is wrong, the sequence is longer than `max_seq_len`, or
                an id is none of the vocabulary (which a GPU says in words of its own).
        """
        _check_batch(token_ids, mask)
        if token_ids.shape[-1] > self.max_seq_len:
            raise ValueError(
                f"the sequence has {token_ids.shape[-1]} tokens, but the model was built for "
                f"max_seq_len ({self.max_seq_len})"
            )
        context = TokenContext(mask=mask, token_ids=token_ids)
        x = self.positions.embed(self._embed(token_ids) * self.embedding_scale)
        x = self.dropout(x)
        routings: dict[str, Routing] = {}
        for index, layer in enumerate(self.layers):
            output = self._run(layer, x, context)
            x = output.hidden
            for kind, name in layer_names(index).items():
                routing = getattr(output, kind)
                if routing is not None:
                    routings[name] = routing
        return DecoderOutput(self.unembedding(self.final_norm(x)), routings)

    def routers(self) -> dict[str, Router]:
        """The routers behind `DecoderOutput.routings`, under the same names."""
        return {
            layer_names(index)[kind]: router
            for index, layer in enumerate(self.layers)
            for kind, router in cast("Block", layer).ffn.routers().items()
        }

    def _embed(self, token_ids: Tensor) -> Tensor:
        token_ids = token_ids.long()  # narrower ones are taken too
        if self.mask_embedding is None:
            return self._look_up(token_ids, token_ids)
        masked = token_ids == self.mask_token_id
        known = self._look_up(token_ids.masked_fill(masked, 0), token_ids)
        return torch.where(masked.unsqueeze(-1), self.mask_embedding, known)

    def _look_up(self, known_ids: Tensor, token_ids: Tensor) -> Tensor:
        try:
            return self.embedding(known_ids)
        except IndexError as error:
            num_ids = self.mask_token_id + (self.mask_embedding is not None)
            raise ValueError(
                f"token_ids must lie in [0, {num_ids}), but reach from {int(token_ids.min())} to "
                f"{int(token_ids.max())}"
            ) from error

    def _run(self, layer: nn.Module, x: Tensor, context: TokenContext) -> FFNOutput:
        if self.config.activation_checkpointing and torch.is_grad_enabled():
            return cast(
                "FFNOutput", checkpoint(layer, x, self.positions, context, use_reentrant=False)
            )
        return layer(x, self.positions, context)


def _check_batch(token_ids: Tensor, mask: Tensor | None) -> None:
    """Refuse what is no (B, S); of what dtype both are is `TokenContext`'s to check."""
    for name, value in (("token_ids", token_ids), ("mask", mask)):
        if value is None and name == "mask":
            continue
        if not isinstance(value, Tensor):
            raise TypeError(f"{name} must be a torch.Tensor, but is of type {type(value).__name__}")
    if token_ids.ndim != 2:
        raise ValueError(f"token_ids must be (batch, sequence), but has {tuple(token_ids.shape)}")
    if mask is not None and mask.shape != token_ids.shape:
        raise ValueError(
            f"mask must have the shape of token_ids, {tuple(token_ids.shape)}, "
            f"but has {tuple(mask.shape)}"
        )
