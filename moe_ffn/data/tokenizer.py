"""From text to token ids and back, exactly."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Self

import numpy as np

from moe_ffn.errors import ConfigError


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
        """The ids of each text, (num_tokens,) of `dtype`."""

    def encode(self, text: bytes) -> np.ndarray:
        """The ids of `text`, (num_tokens,) of `dtype`."""
        return self.encode_batch([text])[0]

    def decode(self, ids: Iterable[int]) -> str:
        """The text of `ids`; bytes that are not UTF-8 become U+FFFD, an end of document nothing."""
        text = b"".join(self.token_bytes[index] for index in ids)
        return text.decode("utf-8", errors="replace")

    @abstractmethod
    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON and checkpoints, from which `from_dict` makes an equal one."""

    @classmethod
    @abstractmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        """The tokenizer whose `to_dict` gave `values`; ConfigError where that was another kind."""


def require_kind(values: Mapping[str, Any], kind: str) -> None:
    """Raises ConfigError where stored `values` come from another kind of tokenizer."""
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
        return [np.frombuffer(text, dtype=np.uint8).astype(self.dtype) for text in texts]

    def to_dict(self) -> dict[str, Any]:
        return {"type": "bytes"}

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> Self:
        require_kind(values, "bytes")
        return cls()
