"""Generation of text that continues a prompt."""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

from moe_ffn.config.base import MAX_COUNT, Config
from moe_ffn.config.errors import ConfigError
from moe_ffn.data.prepare import PreparedData
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.model.decoder import Decoder, DecoderOutput
from moe_ffn.model.generate import Decoding, Sampling


class SampleConfig(Config, frozen=True):
    """The text that the model writes at every validation."""

    prompt: str | None = Field(default=None, min_length=1)
    """Text to continue; by default the first words of the validation split."""
    num_tokens: int = Field(default=256, ge=0, le=MAX_COUNT)
    """Number of tokens to generate; 0: no text."""
    temperature: float = Field(default=0.7, ge=0)
    """Divisor of the logits before sampling; 0: always the most probable token."""
    top_k: int | None = Field(default=40, ge=1, le=MAX_COUNT)
    """Number of most probable tokens to sample from; null: all."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Sample from the smallest set of most probable tokens with this total probability; null: from all."""
    stop: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False)] = ()
    """Stop strings; the text ends before the first one."""

    @property
    def sampling(self) -> Sampling:
        return Sampling(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)


PROMPT_TOKENS, PROMPT_WORDS, PROMPT_CHARACTERS = 64, 4, 40
"""Limits of the default prompt, which is the beginning of the validation split."""


def first_words(data: PreparedData) -> str:
    """Return the first words of the validation split."""
    ids = data.validation[:PROMPT_TOKENS]
    end = np.flatnonzero(ids == data.tokenizer.end_of_document)[:1]
    # The last token may end inside a character.
    text = data.tokenizer.decode(ids[: end[0]] if len(end) else ids).rstrip(
        "\N{REPLACEMENT CHARACTER}"
    )
    words = re.match(rf"\s*(\S+\s+){{0,{PROMPT_WORDS - 1}}}\S+", text)
    return (words[0] if words else text)[:PROMPT_CHARACTERS] or "\n"


def encode_text(tokenizer: Tokenizer, text: str | bytes, max_seq_len: int, where: str) -> list[int]:
    """Return the ids of a text as one sequence; ConfigError, naming `where`, for more than `max_seq_len`."""
    ids = tokenizer.encode(text).tolist()
    if len(ids) > max_seq_len:
        raise ConfigError(
            f"{where}: has {len(ids)} tokens, but the model takes sequences of {max_seq_len} "
            "(data.seq_len); give a shorter text"
        )
    return ids


def run_prompt(options: SampleConfig, data: PreparedData, seq_len: int) -> str:
    """Return the prompt of a run (ConfigError if too long), or the first words of the validation split."""
    if options.prompt is not None:
        encode_text(data.tokenizer, options.prompt, seq_len, "sample.prompt")
        return options.prompt
    ids = data.tokenizer.encode(first_words(data))[:seq_len]
    return data.tokenizer.decode(ids).rstrip("\N{REPLACEMENT CHARACTER}") or "\n"


class TextStream:
    """Decodes tokens to text piece by piece, up to the first stop string.

    The end of the text is held back while it may be part of a character or of a stop string.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        self.has_stopped = False
        self._token_bytes = tokenizer.token_bytes
        self._characters = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = stop
        self._held_back = ""

    def add(self, token_id: int) -> str:
        """Add a token; return the text that no later token can change."""
        return self._take(self._characters.decode(self._token_bytes[token_id]))

    def end(self) -> str:
        """Return the text held back, if no stop string came; an incomplete character becomes U+FFFD."""
        piece = self._take(self._characters.decode(b"", final=True))
        return piece if self.has_stopped else piece + self._held_back

    def _take(self, text: str) -> str:
        if self.has_stopped:
            return ""
        text = self._held_back + text
        stop_starts = [start for stop in self._stop if (start := text.find(stop)) >= 0]
        self.has_stopped = bool(stop_starts)
        if stop_starts:
            return text[: min(stop_starts)]
        cut = 0
        while cut < len(text) and not any(stop.startswith(text[cut:]) for stop in self._stop):
            cut += 1
        self._held_back = text[cut:]
        return text[:cut]


def stream_texts(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[Sequence[int]],
    options: SampleConfig,
    seed: int,
    observe: Callable[[DecoderOutput, int], None] | None = None,
) -> Iterator[tuple[int, int, str]]:
    """Continue several prompts in one batch, until `options.num_tokens` or a stop string ends each.

    Yields the index of a prompt, a new token, and the piece of text that the token completes. The same seed
    gives the same texts. `observe` is that of `Decoding`, but also receives the output for the last token.
    """
    device = next(decoder.parameters()).device
    decoding = Decoding(
        decoder,
        [torch.tensor(ids, dtype=torch.int64, device=device) for ids in prompts],
        options.num_tokens,
        options.sampling,
        torch.Generator(device).manual_seed(seed),
        observe,
    )
    texts = [TextStream(tokenizer, options.stop) for _ in prompts]
    for step, new_ids in enumerate(decoding, 1):
        for row, token_id in new_ids.items():
            text = texts[row]
            piece = text.add(token_id)
            yield row, token_id, piece + (text.end() if step == options.num_tokens else "")
        stopped = [row for row in new_ids if texts[row].has_stopped]
        if observe is not None and (stopped or step == options.num_tokens):
            decoding.read()
        for row in stopped:
            decoding.close(row)


def sample_text(
    decoder: Decoder, tokenizer: Tokenizer, prompt: str, options: SampleConfig, seed: int
) -> str:
    """Return the text that the model writes after a prompt; the same seed gives the same text."""
    ids = tokenizer.encode(prompt).tolist()
    return "".join(piece for *_, piece in stream_texts(decoder, tokenizer, [ids], options, seed))
