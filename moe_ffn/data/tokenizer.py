"""From text to token ids and back, exactly."""

from __future__ import annotations

import operator
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from moe_ffn.errors import ConfigError, show


class Tokenizer(ABC):
    """A fixed vocabulary of byte strings, and the rule that cuts text into them.

    Encoding loses nothing: the byte strings of the tokens, joined, are the bytes that were encoded,
    valid UTF-8 or not.
    """

    def __init__(self, token_bytes: Sequence[bytes], end_of_document: int) -> None:
        self.token_bytes = tuple(token_bytes)
        """The bytes each token stands for; empty for the end of document."""
        self.end_of_document = end_of_document
        """The id that ends every document; it never comes out of `encode`."""
        self.byte_lengths = np.array([len(token) for token in self.token_bytes], dtype=np.int64)
        """Bytes of text per token, (vocab_size,), which turns loss per token into bits per byte."""
        self.byte_lengths.flags.writeable = False

    @property
    def vocab_size(self) -> int:
        """Number of token ids, the end of document included."""
        return len(self.token_bytes)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest unsigned type of at least two bytes that holds every id."""
        return np.dtype(np.uint16 if self.vocab_size <= 1 << 16 else np.uint32)

    @abstractmethod
    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        """The ids of each text, (num_tokens,) of `dtype`; TypeError where one is not bytes."""

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of `text`, (num_tokens,) of `dtype`."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, an end of document nothing.

        Raises:
            TypeError, ValueError: an id is no whole number, or none of the vocabulary.
        """
        places = list(map(_whole_number, ids))
        outside = [place for place in places if not 0 <= place < self.vocab_size]
        if outside:
            raise ValueError(f"ids must lie in [0, {self.vocab_size}), got {outside[0]}")
        text = b"".join(self.token_bytes[place] for place in places)
        return text.decode("utf-8", errors="replace")

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON and checkpoints, from which `from_dict` makes an equal one."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The tokenizer whose `to_dict` gave `values`; ConfigError where that was another kind."""


def require_bytes(texts: Sequence[bytes]) -> None:
    """Raises TypeError where a text is anything else."""
    for text in texts:
        if not isinstance(text, bytes | bytearray | memoryview):
            raise TypeError(
                f"a tokenizer encodes bytes, but got a value of type {type(text).__name__}; a str has "
                ".encode()"
            )


def _whole_number(index: Any) -> int:
    try:
        return operator.index(index)
    except TypeError as error:
        raise TypeError(f"ids must be whole numbers, got {show(index)}") from error


def require_kind(values: Mapping[str, Any], kind: str) -> None:
    """Raises ConfigError where stored `values` come from another kind of tokenizer."""
    if not isinstance(values, Mapping):
        raise ConfigError(
            f"data.tokenizer: the stored tokenizer must be a mapping, but is {show(values)}"
        )
    if values.get("type") != kind:
        raise ConfigError(
            f"data.tokenizer.type: '{kind}', but the stored tokenizer is '{values.get('type')}'; "
            "use the config it was stored with"
        )


class BytesTokenizer(Tokenizer):
    """Ids 0 to 255 are the bytes themselves, 256 is the end of document."""

    def __init__(self) -> None:
        super().__init__([*(bytes([value]) for value in range(256)), b""], end_of_document=256)

    def encode_batch(self, texts: Sequence[bytes]) -> list[np.ndarray]:
        require_bytes(texts)
        return [np.frombuffer(text, dtype=np.uint8).astype(self.dtype) for text in texts]

    def to_dict(self) -> dict[str, Any]:
        return {"type": "bytes"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        require_kind(values, "bytes")
        return cls()
