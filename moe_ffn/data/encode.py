"""Encoding the two splits of a corpus into files of token ids."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from moe_ffn.data.cache import writing_to
from moe_ffn.data.corpus import Split
from moe_ffn.data.split import Piece
from moe_ffn.data.tokenizer import Tokenizer

_ENCODED_AT_ONCE = 1 << 20


@dataclass(frozen=True)
class SplitSize:
    """How much one split holds."""

    num_documents: int
    """Documents with any of their text in this split."""

    num_bytes: int
    num_tokens: int
    """With one end of document for each document that ends in this split."""


def encode_splits(
    pieces: Iterable[Piece], tokenizer: Tokenizer, folder: Path, cache_dir: Path
) -> dict[Split, SplitSize]:
    """Writes `train.bin` and `validation.bin` into `folder`, ids of `tokenizer.dtype` one after
    another.

    Raises ConfigError, naming `cache_dir`, where they cannot be written.
    """
    with (
        _new_split(folder / "train.bin", cache_dir) as train,
        _new_split(folder / "validation.bin", cache_dir) as validation,
    ):
        files: dict[Split, _SplitFile] = {"train": train, "validation": validation}
        end_of_document = np.array([tokenizer.end_of_document], dtype=tokenizer.dtype)
        for batch in _batched(pieces):
            encoded = tokenizer.encode_batch([piece.text for piece in batch])
            with writing_to(cache_dir):
                for piece, ids in zip(batch, encoded, strict=True):
                    files[piece.split].add(piece, end_of_document if piece.ends_document else ids)
        with writing_to(cache_dir):
            return {split: file.finish() for split, file in files.items()}


@contextlib.contextmanager
def _new_split(path: Path, cache_dir: Path) -> Iterator[_SplitFile]:
    """A split to write. What the disk does not take is told by the write, not by the close."""
    with writing_to(cache_dir):
        file = path.open("wb")
    try:
        yield _SplitFile(file)
        with writing_to(cache_dir):
            file.close()
    finally:
        # A buffer that could not be written raises again here, over the sentence that says why.
        with contextlib.suppress(OSError):
            file.close()


class _SplitFile:
    """One split being written, and counted."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._num_documents = self._num_bytes = self._num_tokens = 0
        self._within_document = False

    def add(self, piece: Piece, ids: np.ndarray) -> None:
        if not self._within_document:
            self._num_documents += 1
        self._within_document = not piece.ends_document
        self._num_bytes += len(piece.text)
        self._num_tokens += len(ids)
        self._file.write(ids.tobytes())

    def finish(self) -> SplitSize:
        """Returns when the ids are on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())
        return SplitSize(self._num_documents, self._num_bytes, self._num_tokens)


def _batched(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """The same pieces in lists of about a megabyte, which a tokenizer may spread over cores."""
    batch: list[Piece] = []
    size = 0
    for piece in pieces:
        batch.append(piece)
        size += len(piece.text)
        if size >= _ENCODED_AT_ONCE:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
