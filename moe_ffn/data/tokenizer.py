"""Tokenizers: text to token ids and back, without loss."""

from __future__ import annotations

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from moe_ffn.config.base import TaggedConfig
from moe_ffn.config.errors import ConfigError, expand_path, first_line, import_optional, show
from moe_ffn.config.files import read_object


class Tokenizer(ABC):
    """Fixed vocabulary of byte strings, and the rule that splits any text, UTF-8 or not, without loss."""

    def __init__(self, token_bytes: Sequence[bytes], end_of_document: int) -> None:
        self.token_bytes = tuple(token_bytes)
        """Bytes of each token; empty for the end-of-document token."""
        self.end_of_document = end_of_document
        """Id of the token that ends every document; `encode` never returns it."""
        self.byte_lengths = np.array([len(token) for token in self.token_bytes], dtype=np.int64)
        """Number of bytes per token, (vocab_size,), which turns loss per token into bits per byte."""
        self.byte_lengths.flags.writeable = False

    @property
    def vocab_size(self) -> int:
        """Number of token ids, including the end-of-document token."""
        return len(self.token_bytes)

    @property
    def dtype(self) -> np.dtype[Any]:
        """Dtype of token files: the smallest unsigned type of at least two bytes that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    @abstractmethod
    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        """Return the ids of each text, (num_tokens,) of `dtype`."""

    def encode(self, text: str | bytes) -> Tensor:
        """Return the ids of `text` for a model, int64 (num_tokens,)."""
        return torch.from_numpy(self.encode_batch([text])[0].astype(np.int64))

    def decode(self, ids: Iterable[int] | Tensor) -> str:
        """Return the text of `ids`, U+FFFD for bytes not UTF-8; ValueError for an unknown id."""
        ids = list(ids.tolist() if isinstance(ids, Tensor) else ids)
        outside = [token_id for token_id in ids if not 0 <= token_id < self.vocab_size]
        if outside:
            raise ValueError(f"ids must lie in [0, {self.vocab_size}), got {outside[0]}")
        text = b"".join(self.token_bytes[token_id] for token_id in ids)
        return text.decode("utf-8", errors="replace")

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which `TokenizerConfig.restore` reads."""

    def to_hugging_face(self) -> dict[str, Any] | None:
        """Return the content of a Hugging Face `tokenizer.json`; None if there is no equivalent."""
        return None


def _as_bytes(text: str | bytes) -> bytes:
    return text.encode() if isinstance(text, str) else bytes(text)


class TokenizerConfig(TaggedConfig, frozen=True):
    """Rule that turns text into token ids."""

    @property
    def max_vocab_size(self) -> int:
        """Largest possible vocabulary size; by default 256 bytes and an end-of-document token."""
        return 257

    def identity(self) -> dict[str, Any]:
        """Return plain values that determine the tokens of a text; part of the cache key."""
        return self.to_dict()

    @abstractmethod
    def build(self, text: Iterable[bytes]) -> Tokenizer:
        """Build the tokenizer for `text`, the training split, which is read at most once."""

    @abstractmethod
    def restore(self, values: Mapping[str, Any]) -> Tokenizer:
        """Restore a tokenizer from its `to_dict`; raise ConfigError if it is of another type."""


def _require_type(values: Mapping[str, Any], tag: str) -> None:
    """Raise ConfigError if stored `values` come from another type of tokenizer."""
    if values.get("type") != tag:
        raise ConfigError(
            f"data.tokenizer.type: '{tag}', but the stored tokenizer is '{values.get('type')}'; "
            "use the config it was stored with"
        )


class BytesConfig(TokenizerConfig, frozen=True):
    """Each byte is a token: 256 bytes and an end-of-document token; nothing to train."""

    type: Literal["bytes"] = "bytes"

    def build(self, text: Iterable[bytes]) -> Tokenizer:
        return BytesTokenizer()

    def restore(self, values: Mapping[str, Any]) -> Tokenizer:
        _require_type(values, "bytes")
        return BytesTokenizer()


class BytesTokenizer(Tokenizer):
    """Ids 0 to 255 are bytes, and 256 is the end of document."""

    def __init__(self) -> None:
        super().__init__([*(bytes([value]) for value in range(256)), b""], end_of_document=256)

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        return [np.frombuffer(_as_bytes(text), dtype=np.uint8).astype(self.dtype) for text in texts]

    def to_dict(self) -> dict[str, Any]:
        return {"type": "bytes"}

    def to_hugging_face(self) -> dict[str, Any]:
        """Return a byte-pair encoding without merges."""
        byte_level = {
            "type": "ByteLevel",
            "add_prefix_space": False,
            "trim_offsets": True,
            "use_regex": False,
        }
        end = {"id": 256, "content": _END, "special": True, "normalized": False}
        end |= dict.fromkeys(("single_word", "lstrip", "rstrip"), False)
        return {
            "version": "1.0",
            "added_tokens": [end],
            "pre_tokenizer": byte_level,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": {**_alphabet(), _END: 256}, "merges": []},
        }


class BPEConfig(TokenizerConfig, frozen=True):
    """Byte-level BPE as in GPT-2, trained on the training split."""

    type: Literal["bpe"] = "bpe"

    vocab_size: int = Field(default=4096, ge=512, le=2**24)
    """Vocabulary size, including the 256 bytes and the end-of-document token; a short text may give fewer."""

    @property
    def max_vocab_size(self) -> int:
        return self.vocab_size

    def build(self, text: Iterable[bytes]) -> Tokenizer:
        return train_bpe(text, self.vocab_size)

    def restore(self, values: Mapping[str, Any]) -> Tokenizer:
        _require_type(values, "bpe")
        return BPETokenizer(values.get("tokenizer", {}))


class FileTokenizerConfig(TokenizerConfig, frozen=True):
    """A byte-level BPE that was trained elsewhere, such as GPT-2's, or by an earlier run."""

    type: Literal["file"] = "file"

    path: str = Field(min_length=1)
    """A tokenizer.json of Hugging Face, or the tokenizer.json of a run's folder."""

    @property
    def max_vocab_size(self) -> int:
        return self._read().vocab_size

    def identity(self) -> dict[str, Any]:
        return {"type": "file", "tokenizer": self._read().to_dict()}  # independent of the path

    def build(self, text: Iterable[bytes]) -> Tokenizer:
        return self._read()

    def restore(self, values: Mapping[str, Any]) -> Tokenizer:
        return _restored(values)

    def _read(self) -> Tokenizer:
        path = expand_path(self.path, "data.tokenizer.path")
        return read_tokenizer(path, f"data.tokenizer.path: '{path}'")


def read_tokenizer(path: Path, where: str) -> Tokenizer:
    """Read a tokenizer.json of Hugging Face or of a run's folder. Raise ConfigError, whose message begins
    with `where`, if it is missing, damaged, or of another type.
    """
    if (values := read_object(path)) is None:
        raise ConfigError(f"{where} does not exist, or is not a tokenizer.json")
    # A tokenizer stored by a run has a type.
    return _restored(values) if "type" in values else BPETokenizer(values, where)


def _restored(values: Mapping[str, Any]) -> Tokenizer:
    return (BytesConfig() if values.get("type") == "bytes" else BPEConfig()).restore(values)


_END = "<|endoftext|>"

_STORED = "data.tokenizer: the stored tokenizer of type 'bpe'"
_NEED = "data.tokenizer.type: 'bpe' needs the tokenizers package"

_PROBE = "The Café\u00a0 costs  1,50\u20ac\r\n\tor e\u0301 ".encode()
"""Text with capitals, repeated and outer spaces, and characters that a normalizer would change."""

_NOT_UTF8 = re.compile("([\udc80-\udcff]+)")
"""Runs of bytes that are not UTF-8, as `surrogateescape` decodes them."""


def train_bpe(text: Iterable[bytes], vocab_size: int) -> BPETokenizer:
    """Train a tokenizer of at most `vocab_size` tokens: end of document, 256 bytes, and merges."""
    tokenizers = import_optional("tokenizers", _NEED)
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
    """Trained byte-pair encoding; the text `<|endoftext|>` is encoded as text, not as the special token."""

    def __init__(self, definition: Mapping[str, Any], where: str = _STORED) -> None:
        """Read a byte-level `tokenizer.json` of Hugging Face. Raise ConfigError, whose message begins with
        `where`, if it is damaged, loses text, or is of another type.
        """
        tokenizers = import_optional("tokenizers", _NEED)
        try:
            self._definition = dict(definition)
            self._bpe = tokenizers.Tokenizer.from_str(json.dumps(self._definition))
        except Exception as error:  # `tokenizers` raises nothing more precise
            raise ConfigError(f"{where} cannot be read: {first_line(error)}") from error
        self._bpe.encode_special_tokens = True
        self._bpe.no_truncation()
        self._bpe.no_padding()
        id_of: dict[str, int] = self._bpe.get_vocab()
        byte_of = _alphabet()
        bytes_of = {index: _bytes_of(token, byte_of, where) for token, index in id_of.items()}
        if bytes_of.keys() != set(range(len(id_of))):
            raise ConfigError(
                f"{where} must number its {len(id_of)} tokens from 0 to {len(id_of) - 1}, without gaps; use "
                "another file"
            )
        missing = [token for token in (_END, *byte_of) if token not in id_of]
        if missing:
            fix = ", which ends each document; rename the end-of-text token of the file to it everywhere"
            raise ConfigError(
                f"{where} has no token {show(missing[0])}{fix if missing[0] == _END else ''}"
            )
        super().__init__([bytes_of[index] for index in range(len(id_of))], id_of[_END])
        self._id_of_byte = {value: id_of[character] for character, value in byte_of.items()}
        if b"".join(self.token_bytes[index] for index in self.encode(_PROBE)) != _PROBE:
            raise ConfigError(
                f"{where} loses text: its normalizer or pre_tokenizer changes it; remove both from the "
                "file, or use another tokenizer"
            )

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[np.ndarray]:
        # The parts of a text alternate: UTF-8 at even indices, runs of other bytes at odd indices.
        parts_of_texts = [
            _NOT_UTF8.split(_as_bytes(text).decode("utf-8", "surrogateescape")) for text in texts
        ]
        utf8 = [part for parts in parts_of_texts for part in parts[::2]]
        encoded = iter(self._bpe.encode_batch_fast(utf8, add_special_tokens=False))

        def ids(parts: list[str]) -> Iterator[Sequence[int]]:
            for index, part in enumerate(parts):
                if index % 2 == 0:
                    yield next(encoded).ids
                else:
                    yield [self._id_of_byte[ord(character) - 0xDC00] for character in part]

        return [
            np.fromiter(chain.from_iterable(ids(parts)), dtype=self.dtype)
            for parts in parts_of_texts
        ]

    def to_dict(self) -> dict[str, Any]:
        return {"type": "bpe", "tokenizer": self._definition}

    def to_hugging_face(self) -> dict[str, Any]:
        return self._definition


def _bytes_of(token: str, byte_of: Mapping[str, int], where: str) -> bytes:
    if token == _END:
        return b""
    if not set(token) <= byte_of.keys():
        raise ConfigError(f"{where} has the token {show(token)}, which is not byte-level")
    return bytes(byte_of[character] for character in token)


def bytes_of_token(token: str, *, byte_level: bool) -> bytes:
    """Return the bytes of a token: its characters stand for bytes as in GPT-2, or if not `byte_level`, U+2581
    is a space and `<0xE2>` a byte.
    """
    if byte_level:
        byte_of = _alphabet()
        known = set(token) <= byte_of.keys()  # False for a token that was added later
        return bytes(byte_of[character] for character in token) if known else token.encode()
    if re.fullmatch("<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()


def _alphabet() -> dict[str, int]:
    """Return character -> byte of GPT-2's tokens (https://github.com/openai/gpt-2, `bytes_to_unicode`):
    itself for a printable Latin-1 byte, U+0100 onwards for the 68 others.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)).difference(printable))
    alphabet = {chr(value): value for value in printable}
    return alphabet | {chr(0x100 + index): value for index, value in enumerate(others)}
