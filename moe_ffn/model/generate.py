"""Sampling text, one token at a time."""

from __future__ import annotations

import math

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
        prompt_ids: integers (S,), at least one token.
        num_tokens: how many to add.
        temperature: divides the logits; 0 takes the most probable token.
        top_k: sample among this many most probable tokens; None takes all.

    Raises:
        TypeError, ValueError: an argument is none of these.
        RuntimeError: the model's logits are NaN or infinite.

    Returns:
        int64 (num_tokens,), the new tokens. The model is in evaluation meanwhile, and afterwards in
        the mode it was in.
    """
    _check_numbers(num_tokens, temperature, top_k)
    if not isinstance(prompt_ids, Tensor):
        kind = type(prompt_ids).__name__
        raise TypeError(f"prompt_ids must be a torch.Tensor, but is of type {kind}")
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
    best = logits_V.max()
    if not best.isfinite():
        raise RuntimeError(f"the model's largest logit is {best}: there is no next token")
    if temperature == 0:
        return logits_V.argmax(keepdim=True)
    if top_k is not None and top_k < logits_V.numel():
        logits_V = logits_V.masked_fill(logits_V < logits_V.topk(top_k).values[-1], -torch.inf)
    # From the best on, in float64: divided by a tiny temperature it would be infinite, its softmax NaN.
    scaled_V = (logits_V - best).double() / temperature
    return torch.multinomial(scaled_V.float().softmax(-1), 1, generator=generator)


def _check_numbers(num_tokens: int, temperature: float, top_k: int | None) -> None:
    counts = {"num_tokens": (num_tokens, 0), "top_k": (1 if top_k is None else top_k, 1)}
    for name, (value, least) in counts.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")
    if not (isinstance(temperature, int | float) and 0 <= temperature < math.inf):
        raise ValueError(f"temperature must be a finite number of at least 0, got {temperature!r}")
