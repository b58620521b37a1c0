"""Documents of a corpus, read in blocks so that no file has to fit into memory."""

from __future__ import annotations

import codecs
import glob
import hashlib
import json
import logging
import os
import sysconfig
import time
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, BinaryIO, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from moe_ffn.config.base import TaggedConfig
from moe_ffn.config.errors import ConfigError, expand_path
from moe_ffn.config.files import reason

log = logging.getLogger(__name__)

BLOCK_BYTES = 1 << 16
"""Maximum bytes of a block: large enough to encode efficiently, small enough to spread over cores."""

Split = Literal["train", "validation"]


@dataclass(frozen=True)
class Document:
    """One text of a corpus."""

    name: str
    """Name that determines the split; need not be unique."""
    blocks: Iterable[bytes]
    """Text in order; can be iterated only once."""
    split: Split | None = None
    """Split of this document; None derives it from the name."""


@dataclass(frozen=True)
class TokenFiles:
    """Files of token ids, in order."""

    train: tuple[Path, ...]
    validation: tuple[Path, ...] | None
    """Validation files; None takes the end of `train`."""
    dtype: np.dtype[Any] | None
    """Dtype of files without a header; None takes the dtype of the tokenizer."""


TEXT_HINT = "; for your own text files use data.corpus: {type: text, paths: [PATH]}"


class CorpusConfig(TaggedConfig, frozen=True):
    """Source of the text."""

    wrong_value_hint: ClassVar[str] = TEXT_HINT

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """Return all documents, in the same order at every call; ConfigError if there are none."""

    def require_files(self) -> None:
        """Raise ConfigError if a file that the config names is missing; read no file."""

    def stamp(self) -> str | None:
        """Return a digest of names, sizes and times of all files; a corpus with the same stamp is not read
        again. None without files, or if one has just changed or vanished.
        """
        return None

    def token_files(self) -> TokenFiles | None:
        """Return the files of a corpus of token ids; None for text."""
        return None


class StdlibConfig(CorpusConfig, frozen=True):
    """Source code of Python's standard library: about 390 files, 8 MB."""

    type: Literal["stdlib"] = "stdlib"

    def documents(self) -> Iterator[Document]:
        """Return the source files, without tests, GUI packages and tables of data."""
        for name, path in self._files():
            yield Document(name, file_blocks(path))

    def stamp(self) -> str | None:
        return _stamp(self._files())

    def _files(self) -> list[tuple[str, Path]]:
        root = Path(sysconfig.get_path("stdlib"))
        paths = [path for path in _files_below(root, _NOT_SOURCE) if path.suffix == ".py"]
        if not paths:
            raise ConfigError(
                f"data.corpus.type: 'stdlib' finds no .py files in '{root}'; "
                "use 'text' with data.corpus.paths"
            )
        return sorted((path.relative_to(root).as_posix(), path) for path in paths)


Paths = Annotated[
    tuple[Annotated[str, Field(min_length=1)], ...],
    Field(strict=False, min_length=1),
    BeforeValidator(
        lambda value: (value,) if isinstance(value, str) else value,
        json_schema_input_type=str | tuple[str, ...],
    ),
]
"""Files, folders and globs; a single path needs no list."""


class TextConfig(CorpusConfig, frozen=True):
    """Your own UTF-8 text files; each file is one document."""

    type: Literal["text"] = "text"

    paths: Paths
    """Files, folders (searched recursively) or globs (`books/**/*.txt`), relative to the current folder.
    Hidden and binary files found in a folder or by a glob are skipped. For records (.jsonl, .csv,
    .parquet), use type hf_dataset."""

    def require_files(self) -> None:
        for path in self.paths:
            next(files_of(path), None)

    def documents(self) -> Iterator[Document]:
        """Return the text files under `paths`, each once, named by their path below the folder or the fixed
        part of the glob, so that moving a corpus does not change its split. ConfigError if a path is missing
        or not text.
        """
        return read_text_documents(self.paths)

    def stamp(self) -> str | None:
        return _stamp([(file.name, file.path) for file in _distinct_files(self.paths, PATHS_KEY)])


PATHS_KEY = "data.corpus.paths"


def read_text_documents(paths: Sequence[str], key: str = PATHS_KEY) -> Iterator[Document]:
    """Yield the text files under `paths` as documents; messages name the option `key`."""
    files = _distinct_files(paths, key)
    problems = [_format_problem(file.path, key) for file in files]
    for file, problem in zip(files, problems, strict=True):
        if problem and (file.is_given or all(problems)):
            raise ConfigError(f"{key}: '{file.path}' {problem}")
    num_bytes, skipped = 0, []
    for file in files:
        size = _text_size(file.path)
        if size is not None:
            yield Document(file.name, file_blocks(file.path))
            num_bytes += size
        elif file.is_given:
            raise ConfigError(
                f"{key}: '{file.path}' is not UTF-8 text; convert it to UTF-8 or leave it out"
            )
        else:
            skipped.append(str(file.path))
    if not num_bytes:
        raise ConfigError(
            f"{key}: {', '.join(map(repr, paths))} is empty, or has only hidden files and files that are not "
            "UTF-8 text; name another file or folder"
        )
    _log_skipped(tuple(skipped))


@cache  # a corpus is read several times while it is prepared
def _log_skipped(paths: Sequence[str]) -> None:
    if paths:
        log.info(
            "data: files skipped, since they are not UTF-8 text: %d, such as '%s'",
            len(paths),
            paths[0],
        )


def _distinct_files(paths: Sequence[str], key: str) -> list[_File]:
    files: dict[Path, _File] = {}
    for path in paths:
        for file in files_of(path, key):
            files.setdefault(file.path.resolve(), file)
    return list(files.values())


_NOT_SOURCE = frozenset(
    {"test", "tests", "idlelib", "tkinter", "turtledemo", "encodings", "distutils", "lib2to3"}
    | {"pydoc_data", "ensurepip", "site-packages", "dist-packages", "__pycache__"}
)

_RECORDS = frozenset({".json", ".jsonl", ".ndjson", ".csv", ".parquet"})

_COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z"})


@dataclass(frozen=True)
class _File:
    path: Path
    name: str
    is_given: bool
    """True for a file that the user named, False for one found in a folder or by a glob."""


def files_of(pattern: str, key: str = PATHS_KEY) -> Iterator[_File]:
    """Yield the files of one path: the file, the files in the folder, or the matches of the glob."""
    path = expand_path(pattern, key)
    if _is_file(path):
        yield _File(path, path.name, is_given=True)
        return
    if path.is_dir():
        root, matches = path, _files_below(path)
    elif path.exists():
        raise ConfigError(f"{key}: '{pattern}' is neither a file nor a folder")
    elif glob.has_magic(str(path)):
        num_fixed = next(i for i, part in enumerate(path.parts) if glob.has_magic(part))
        root = Path(*path.parts[:num_fixed])
        matches = _glob(root, path.parts[num_fixed:])
        if not matches:
            raise ConfigError(
                f"{key}: '{pattern}' matches no file; '**' searches folders within folders"
            )
    else:
        raise ConfigError(
            f"{key}: '{pattern}' does not exist, or is a broken link (looked in '{Path.cwd()}'); check the "
            "spelling"
        )
    for name in sorted({file.relative_to(root).as_posix() for file in matches}):
        yield _File(root / name, name, is_given=False)


_SETTLED_SECONDS = 2.0
"""A file younger than this may change again without a new modification time."""


def _stamp(files: Collection[tuple[str, Path]]) -> str | None:
    """Implement `CorpusConfig.stamp`; None if a file has just changed or vanished."""
    digest = hashlib.sha256()
    newest = time.time() - _SETTLED_SECONDS
    for name, path in files:
        try:
            stat = path.stat()
        except OSError:
            return None
        if stat.st_mtime > newest:
            return None
        facts = [name, str(path.absolute()), stat.st_size, stat.st_mtime_ns]
        digest.update(json.dumps(facts).encode("utf-8", "surrogateescape"))
    return digest.hexdigest()


def _glob(root: Path, parts: Sequence[str]) -> list[Path]:
    """Return the files below `root` that match a glob; hidden files only if the glob names their dot."""
    if parts[-1] == "**":  # `**` alone matches only folders
        parts = [*parts, "*"]
    with_hidden = any(part.startswith(".") for part in parts if part != "..")
    return [
        path
        for path in root.glob("/".join(parts))
        if _is_file(path) and (with_hidden or not _is_hidden(path.relative_to(root)))
    ]


def _is_hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts if part != "..")


def _files_below(folder: Path, skip: Collection[str] = ()) -> Iterator[Path]:
    """Yield regular files below `folder`, in any order; hidden files, linked folders and `skip` left out."""

    def raise_unreadable(error: OSError) -> None:
        if not isinstance(error, FileNotFoundError | NotADirectoryError):
            raise unreadable(error.filename, error) from error

    for parent, folders, files in os.walk(folder, onerror=raise_unreadable):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        paths = (Path(parent) / name for name in files if not name.startswith("."))
        yield from filter(_is_file, paths)


def _is_file(path: Path) -> bool:
    """Return True for a regular file or a link to one; ConfigError if the path cannot be read."""
    try:
        return path.is_file()
    except OSError as error:
        raise unreadable(path, error) from error


def unreadable(path: Path | str, error: OSError) -> ConfigError:
    return ConfigError(f"data.corpus: '{path}' cannot be read ({reason(error)})")


def _format_problem(path: Path, key: str) -> str | None:
    """Return why a file with this suffix is not plain text, and the fix; None if it may be text. Only a
    program with the option `data.corpus.paths` has one for records too.
    """
    suffix = path.suffix.lower()
    if suffix in _COMPRESSED:
        return f"is compressed ({suffix}); unpack it first"
    if suffix in _RECORDS:
        dataset = f"--data.corpus.type hf_dataset --data.corpus.path {path}"
        advice = f"use {dataset} --data.corpus.text_column NAME, or " if key == PATHS_KEY else ""
        return (
            "holds records, and training would include their brackets and names; "
            f"{advice}write their text into a .txt file"
        )
    return None


def _text_size(path: Path) -> int | None:
    """Return the size of a file in bytes; None if it is not UTF-8 text."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    size = 0
    try:
        for block in file_blocks(path):
            if b"\0" in block:  # UTF-16 text is valid UTF-8 full of NULs
                return None
            decoder.decode(block)
            size += len(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return None
    return size


def file_blocks(path: Path) -> Iterator[bytes]:
    """Yield the content of a file in blocks; ConfigError if it cannot be read."""
    try:
        with path.open("rb") as file:
            yield from blocks(file)
    except OSError as error:
        raise unreadable(path, error) from error


def blocks(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of `file` in blocks of at most BLOCK_BYTES, cut at the end of a line or character."""
    rest = b""
    while len(block := rest + file.read(BLOCK_BYTES - len(rest))) == BLOCK_BYTES:
        end = text_boundary(block, len(block)) or len(block)
        yield block[:end]
        rest = block[end:]
    if block:
        yield block


def text_boundary(text: bytes, at: int, reach: int = BLOCK_BYTES) -> int:
    """Return the last line end up to `at`; if none is within `reach` bytes, the last end of a character."""
    line_end = text.rfind(b"\n", max(0, at - reach), at) + 1
    if line_end:
        return line_end
    if at < len(text) and not _is_continuation(text[at]):
        return at
    while at > 0 and _is_continuation(text[at - 1]):
        at -= 1
    # The byte before `at` ends a character, or starts one that extends past the original position.
    return at - 1 if at > 0 and text[at - 1] >= 0xC0 else at


def _is_continuation(byte: int) -> bool:
    """Return True for a byte of UTF-8 that does not start a character."""
    return byte & 0xC0 == 0x80
