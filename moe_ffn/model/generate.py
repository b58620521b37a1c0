"""Sampling text, one token at a time."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ffn.model.decoder import Decoder


@torch.no_grad()
def generate(
    model: Decoder,
    prompt_ids: Tensor,
    num_tokens: int,
    temperature: float = 0.8,
    top_k: int | None = 50,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Continue a prompt; the model sees the last `max_seq_len` tokens.

    Args:
        prompt_ids: int64 (S,), at least one token.
        num_tokens: how many to add.
        temperature: divides the logits; 0 takes the most probable token.
        top_k: sample among this many most probable tokens; None takes all.

    Returns:
        int64 (num_tokens,), the new tokens. The model is in evaluation meanwhile, and afterwards in
        the mode it was in.
    """
    if prompt_ids.ndim != 1 or prompt_ids.numel() == 0:
        raise ValueError(f"prompt_ids must be (S,) with S >= 1, got {tuple(prompt_ids.shape)}")
    was_training = model.training
    model.eval()
    token_ids = prompt_ids
    try:
        for _ in range(num_tokens):
            window = token_ids[-model.max_seq_len :]
            logits = model(window[None]).logits[0, -1].float()
            chosen = _choose(logits, temperature, top_k, generator)
            token_ids = torch.cat([token_ids, chosen])
    finally:
        model.train(was_training)
    return token_ids[len(prompt_ids) :]


def _choose(
    logits_V: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """int64 (1,): the next token."""
    if temperature == 0:
        return logits_V.argmax(keepdim=True)
    if top_k is not None and top_k < logits_V.numel():
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], -torch.inf)
    return torch.multinomial((logits_V / temperature).softmax(-1), 1, generator=generator)
