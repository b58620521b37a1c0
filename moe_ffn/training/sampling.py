"""Texts that the model writes after a prompt."""

from __future__ import annotations

import re

import numpy as np
import torch
from pydantic import Field

from moe_ffn.config import MAX_COUNT, Config
from moe_ffn.data.prepare import PreparedData
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.model.decoder import Decoder
from moe_ffn.model.generate import generate


class SampleConfig(Config, frozen=True):
    """The text that the trained model writes at the end."""

    prompt: str | None = Field(default=None, min_length=1)
    """Text to continue; by default the first words of the validation split."""
    num_tokens: int = Field(default=256, ge=0, le=MAX_COUNT)
    """Number of tokens to write; 0: no text."""
    temperature: float = Field(default=0.7, ge=0)
    """Divides the logits before sampling; 0: always the most probable token."""
    top_k: int | None = Field(default=40, ge=1, le=MAX_COUNT)
    """Sample among this many most probable tokens; null: among all."""


PROMPT_TOKENS, PROMPT_WORDS, PROMPT_CHARACTERS = 64, 4, 40
"""The default prompt is cut from the validation split to at most this much."""


def first_words(data: PreparedData) -> str:
    """The first words of the validation split, as they stand there."""
    ids = data.validation[:PROMPT_TOKENS]
    end = np.flatnonzero(ids == data.tokenizer.end_of_document)[:1]
    # A character may be cut in two at the end.
    text = data.tokenizer.decode(ids[: end[0]] if len(end) else ids).rstrip(
        "\N{REPLACEMENT CHARACTER}"
    )
    words = re.match(rf"\s*(\S+\s+){{0,{PROMPT_WORDS - 1}}}\S+", text)
    return (words[0] if words else text)[:PROMPT_CHARACTERS] or "\n"


def sample_text(
    decoder: Decoder, tokenizer: Tokenizer, prompt: str, options: SampleConfig, seed: int
) -> str:
    """The text that the model writes after the prompt; the same for the same seed."""
    device = next(decoder.parameters()).device
    prompt_ids = tokenizer.encode(prompt.encode())
    token_ids = generate(
        decoder,
        torch.tensor(prompt_ids, dtype=torch.int64, device=device),
        options.num_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        generator=torch.Generator(device).manual_seed(seed),
    )
    return tokenizer.decode(token_ids.cpu().numpy())
