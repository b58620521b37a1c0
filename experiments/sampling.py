"""Text in, text out."""

from __future__ import annotations

import torch

from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.model.decoder import Decoder
from moe_ffn.model.generate import generate
from moe_ffn.training.config import SampleConfig


def sample_text(decoder: Decoder, tokenizer: Tokenizer, options: SampleConfig, seed: int) -> str:
    """What the model makes of the prompt, without the prompt; the same for the same seed."""
    device = next(decoder.parameters()).device
    prompt = tokenizer.encode(options.prompt.encode())
    token_ids = generate(
        decoder,
        torch.tensor(prompt, dtype=torch.int64, device=device),
        options.num_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        generator=torch.Generator(device).manual_seed(seed),
    )
    return tokenizer.decode(token_ids.cpu().numpy())
