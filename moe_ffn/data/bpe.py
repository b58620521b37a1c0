"""Byte-level byte-pair encoding (as in GPT-2), by Hugging Face `tokenizers`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from typing import Any, Self

import numpy as np

from moe_ffn.data.tokenizer import Tokenizer, require_bytes, require_kind
from moe_ffn.errors import ConfigError, first_line, show

_END = "<|endoftext|>"
_STORED = "data.tokenizer: the stored tokenizer of type 'bpe'"
_PROBE = "The Café\u00a0 costs  1,50\u20ac\r\n\tor e\u0301 ".encode()
"""Capitals, spaces at both ends and in a row, and what a normalizer would compose or replace."""
_NOT_UTF8 = re.compile("([\udc80-\udcff]+)")  # how `surrogateescape` shows bytes that are not UTF-8


def train_bpe(text: Iterable[bytes], vocab_size: int) -> BPETokenizer:
    """Learns at most `vocab_size` tokens: the end of document, 256 bytes, and merges."""
    tokenizers = _import_tokenizers()
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_END],
        initial_alphabet=list(_alphabet()),
        show_progress=False,
    )
    bpe.train_from_iterator((block.decode("utf-8", errors="ignore") for block in text), trainer)
    return BPETokenizer(json.loads(bpe.to_str()))


class BPETokenizer(Tokenizer):
    """A trained byte-pair encoding; text that looks like the end-of-document token stays text."""

    def __init__(self, definition: Mapping[str, Any]) -> None:
        """`definition`: the content of a byte-level `tokenizer.json` of Hugging Face.

        Raises:
            ConfigError: it is another kind of tokenizer, damaged, or one that loses text.
        """
        tokenizers = _import_tokenizers()
        try:
            self._definition = dict(definition)
            self._bpe = tokenizers.Tokenizer.from_str(json.dumps(self._definition))
        except Exception as error:  # `tokenizers` raises nothing more precise
            raise ConfigError(f"{_STORED} cannot be read: {first_line(error)}") from error
        self._bpe.encode_special_tokens = True
        self._bpe.no_truncation()
        self._bpe.no_padding()
        tokens = {index: token for token, index in self._bpe.get_vocab().items()}
        end = self._bpe.token_to_id(_END)
        byte_of = _alphabet()
        _check_vocabulary(self._bpe.get_vocab(), byte_of)
        super().__init__(
            [
                b"" if index == end else bytes(byte_of[character] for character in tokens[index])
                for index in range(len(tokens))
            ],
            end_of_document=end,
        )
        self._id_of_byte = {value: self._bpe.token_to_id(char) for char, value in byte_of.items()}
        if b"".join(self.token_bytes[index] for index in self.encode(_PROBE)) != _PROBE:
            raise ConfigError(
                f"{_STORED} loses text: a normalizer or a pre_tokenizer of it changes what it encodes"
            )

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        require_bytes(texts)
        # In each text, pieces of UTF-8 at even places and runs of other bytes at odd ones.
        pieces = [_NOT_UTF8.split(bytes(text).decode("utf-8", "surrogateescape")) for text in texts]
        utf8 = [piece for parts in pieces for piece in parts[::2]]
        encoded = iter(self._bpe.encode_batch_fast(utf8, add_special_tokens=False))

        def ids(parts: list[str]) -> Iterator[Sequence[int]]:
            for place, part in enumerate(parts):
                if place % 2 == 0:
                    yield next(encoded).ids
                else:
                    yield [self._id_of_byte[ord(character) - 0xDC00] for character in part]

        return [
            np.array(list(chain.from_iterable(ids(parts))), dtype=self.dtype) for parts in pieces
        ]

    def to_dict(self) -> dict[str, Any]:
        return {"type": "bpe", "tokenizer": self._definition}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        require_kind(values, "bpe")
        return cls(values.get("tokenizer", {}))


def _check_vocabulary(ids: Mapping[str, int], byte_of: Mapping[str, int]) -> None:
    """Raises ConfigError where tokens and ids are not one for one, or a token is not of bytes."""
    if sorted(ids.values()) != list(range(len(ids))):
        raise ConfigError(f"{_STORED} does not give each of its {len(ids)} tokens an id of its own")
    missing = [token for token in (_END, *byte_of) if token not in ids]
    if missing:
        raise ConfigError(f"{_STORED} has no token {show(missing[0])}")
    foreign = [token for token in ids if token != _END and not set(token) <= byte_of.keys()]
    if foreign:
        raise ConfigError(
            f"{_STORED} has the token {show(foreign[0])}, which is not written as bytes"
        )


def _alphabet() -> dict[str, int]:
    """The byte each character of a token stands for.

    `tokenizers` writes tokens in GPT-2's alphabet: a printable Latin-1 byte is its own
    character, the 68 others are U+0100 onwards (https://github.com/openai/gpt-2,
    `bytes_to_unicode`).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    alphabet = {chr(value): value for value in printable}
    return alphabet | {chr(0x100 + place): value for place, value in enumerate(others)}


def _import_tokenizers() -> Any:
    try:
        import tokenizers
    except ImportError as error:
        raise ConfigError(
            "data.tokenizer.type: 'bpe' needs the tokenizers package: pip install 'moe_ffn[train]'"
        ) from error
    return tokenizers
