"""Text in, text out."""

from __future__ import annotations

import torch

from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.model.decoder import Decoder
from moe_ffn.model.generate import generate


def sample_text(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    num_tokens: int,
    temperature: float,
    top_k: int | None,
    seed: int,
) -> str:
    """What the model makes of the prompt, without the prompt; the same for the same seed."""
    device = next(decoder.parameters()).device
    prompt_ids = torch.tensor(tokenizer.encode(prompt.encode()), dtype=torch.int64, device=device)
    token_ids = generate(
        decoder,
        prompt_ids,
        num_tokens,
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator(device).manual_seed(seed),
    )
    return tokenizer.decode(token_ids.cpu().numpy())
