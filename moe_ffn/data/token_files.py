"""Corpora of token ids: several files form one sequence, from which only slices are read."""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from moe_ffn.config.errors import ConfigError
from moe_ffn.data.corpus import CorpusConfig, Document, Paths, TokenFiles, files_of, unreadable

SUFFIXES = (".bin", ".npy")


class TokensConfig(CorpusConfig, frozen=True):
    """Files of token ids that another program prepared: .npy, or raw ids (.bin).

    Set `data.tokenizer` to the tokenizer that made them: `{type: file, path: tokenizer.json}`.
    """

    type: Literal["tokens"] = "tokens"
    train: Paths
    """Files, folders or globs, relative to the current folder. Files of a folder or glob are read in the
    order of their names, and only if they end in .bin or .npy."""
    validation: Paths | None = None
    """Validation files; null takes the last data.validation_percent percent of the tokens of `train`."""
    dtype: Literal["uint16", "uint32", "int32", "int64"] | None = None
    """Dtype of files without a header; null takes uint16, or uint32 for a vocabulary above 65,536."""

    def require_files(self) -> None:
        self.token_files()

    def documents(self) -> Iterator[Document]:
        raise ConfigError(
            "data.corpus.type 'tokens' has token ids but no text; use 'text' with data.corpus.paths"
        )

    def token_files(self) -> TokenFiles:
        validation = None if self.validation is None else self._files("validation", self.validation)
        dtype = None if self.dtype is None else np.dtype(self.dtype)
        return TokenFiles(self._files("train", self.train), validation, dtype)

    def _files(self, key: str, paths: Sequence[str]) -> tuple[Path, ...]:
        files = {
            file.path.resolve(): file.path
            for given in paths
            for file in files_of(given, f"data.corpus.{key}")
            if file.is_given or file.path.suffix in SUFFIXES
        }
        if not files:
            raise ConfigError(
                f"data.corpus.{key}: {', '.join(map(repr, paths))} has no token file "
                f"({' or '.join(SUFFIXES)}); name one"
            )
        return tuple(files.values())


@dataclass(frozen=True)
class _File:
    path: Path
    dtype: np.dtype[Any]
    header: int
    """Bytes before the first token."""
    num_tokens: int


class TokenSequence:
    """Tokens of several files as one sequence; a slice reads only its own tokens."""

    def __init__(self, files: Sequence[_File], start: int = 0, stop: int | None = None) -> None:
        """Use the tokens from `start` to `stop` (exclusive), counted over all files."""
        self.files = files
        self.dtype = np.result_type(*(file.dtype for file in files))
        self._ends = np.cumsum([file.num_tokens for file in files]).tolist()
        self.start, self.stop = start, self._ends[-1] if stop is None else stop

    @classmethod
    def of(cls, paths: Sequence[Path], dtype: np.dtype[Any]) -> TokenSequence:
        """Open token files, of this dtype unless they have a header; ConfigError if not a row of ids."""
        return cls([_open_tokens(path, dtype) for path in paths])

    def part(self, start: int, stop: int) -> TokenSequence:
        return TokenSequence(self.files, self.start + start, self.start + stop)

    def __len__(self) -> int:
        return self.stop - self.start

    def __getitem__(self, indices: slice) -> np.ndarray:
        start, stop, step = indices.indices(len(self))
        return self._read(self.start + start, self.start + max(stop, start))[::step]

    def _read(self, start: int, stop: int) -> np.ndarray:
        parts = [np.empty(0, self.dtype)]
        number = bisect_right(self._ends, start)
        while start < stop:
            file, end = self.files[number], min(stop, self._ends[number])
            first = start - (self._ends[number] - file.num_tokens)
            parts.append(_read_tokens(file, first, end - start))
            start, number = end, number + 1
        return parts[-1] if len(parts) == 2 else np.concatenate(parts)

    def digests(self) -> list[FileDigest]:
        """Return a digest of each file, from blocks spread over it, since reading billions of tokens takes
        minutes. A replaced, truncated or extended file gets another digest; a single changed token may go
        unnoticed.
        """
        return [_digest(file) for file in self.files]


@dataclass(frozen=True)
class FileDigest:
    """Identity of a token file: a digest of its size and of blocks that are spread over it."""

    path: Path
    sha256: str
    smallest: int
    """Smallest id in these blocks, at most 0."""
    largest: int
    """Largest id in these blocks; -1 for an empty file."""


def _open_tokens(path: Path, dtype: np.dtype[Any]) -> _File:
    try:
        if path.suffix == ".npy":
            return _open_array(path)
        size = path.stat().st_size
    except OSError as error:
        raise unreadable(path, error) from error
    if size % dtype.itemsize:
        raise ConfigError(
            f"data.corpus: '{path}' has {size} bytes, which is not a whole number of {dtype.name} ids "
            f"({dtype.itemsize} bytes each); give data.corpus.dtype"
        )
    return _File(path, dtype, 0, size // dtype.itemsize)


def _open_array(path: Path) -> _File:
    try:
        array = np.load(path, mmap_mode="r", allow_pickle=False)
    except ValueError as error:
        raise ConfigError(f"data.corpus: '{path}' is not a NumPy array ({error})") from error
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ConfigError(
            f"data.corpus: '{path}' must be a one-dimensional array of integers, but is {array.dtype} of "
            f"shape {array.shape}; save the token ids in one row"
        )
    # As int64, since NumPy joins uint64 and any signed type to float64.
    dtype = np.dtype(array.dtype.str.replace("u8", "i8"))
    return _File(path, dtype, array.offset, len(array))


def _read_tokens(file: _File, first: int, count: int) -> np.ndarray:
    # Read, not memory-mapped: page faults for every window would be slower and fill memory.
    offset = file.header + first * file.dtype.itemsize
    try:
        tokens = np.fromfile(file.path, dtype=file.dtype, count=count, offset=offset)
    except OSError as error:
        raise unreadable(file.path, error) from error
    if len(tokens) != count:
        raise ConfigError(
            f"data.corpus: '{file.path}' was truncated while it was read; start again"
        )
    return tokens


_BLOCK, _NUM_BLOCKS = 4096, 16
"""Tokens per block, and blocks per file, of a `FileDigest`."""


def _digest(file: _File) -> FileDigest:
    digest = hashlib.sha256(f"{file.dtype.str} {file.num_tokens} ".encode())
    smallest, largest = 0, -1
    last = max(file.num_tokens - _BLOCK, 0)
    for first in sorted({last * index // (_NUM_BLOCKS - 1) for index in range(_NUM_BLOCKS)}):
        block = _read_tokens(file, first, min(_BLOCK, file.num_tokens - first))
        digest.update(block.tobytes())
        if len(block):
            smallest, largest = min(smallest, int(block.min())), max(largest, int(block.max()))
    return FileDigest(file.path, digest.hexdigest(), smallest, largest)
