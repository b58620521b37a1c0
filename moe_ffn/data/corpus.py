"""The documents of a corpus, read in blocks so that no file has to fit into memory."""

from __future__ import annotations

import codecs
import fnmatch
import glob
import os
import sysconfig
from abc import abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from moe_ffn.config import TaggedConfig
from moe_ffn.errors import ConfigError, expand_path, reason


class CorpusConfig(TaggedConfig, frozen=True):
    """Where the text comes from."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """All documents, in the same order at every call; ConfigError where there are none."""


class StdlibConfig(CorpusConfig, frozen=True):
    """The source of the running Python's standard library: about 390 files, 8 MB."""

    type: Literal["stdlib"] = "stdlib"

    def documents(self) -> Iterator[Document]:
        return stdlib_documents()


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _none_empty(paths: tuple[str, ...]) -> tuple[str, ...]:
    if "" in paths:
        raise ValueError("holds an empty path; leave it out (the current folder is '.')")
    return paths


class TextConfig(CorpusConfig, frozen=True):
    """Your own UTF-8 text files; each file is one document."""

    type: Literal["text"] = "text"

    paths: Annotated[
        tuple[str, ...],
        Field(strict=False, min_length=1),
        AfterValidator(_none_empty),
        BeforeValidator(_listed, json_schema_input_type=str | tuple[str, ...]),
    ]
    """Files, folders (searched recursively) or globs (`books/**/*.txt`). Hidden and binary files
    found in a folder or by a glob are skipped. What stands in fields (.jsonl, .csv, .parquet) is for
    type hf_dataset."""

    def documents(self) -> Iterator[Document]:
        return text_documents(self.paths)


BLOCK_BYTES = 1 << 16
"""The most bytes a block holds: enough to encode efficiently, small enough to spread over cores."""


Split = Literal["train", "validation"]


_NOT_SOURCE = frozenset(
    {"test", "tests", "idlelib", "tkinter", "turtledemo", "encodings", "distutils", "lib2to3"}
    | {"pydoc_data", "ensurepip", "site-packages", "dist-packages", "__pycache__"}
)


_RECORDS = frozenset({".json", ".jsonl", ".ndjson", ".csv", ".parquet"})


_COMPRESSED = frozenset({".gz", ".bz2", ".xz", ".zst", ".zip", ".tar", ".tgz", ".7z"})


@dataclass(frozen=True)
class Document:
    """One text of a corpus."""

    name: str
    """What the split between training and validation is drawn from; need not be unique."""

    blocks: Iterable[bytes]
    """The text in order; read once."""

    split: Split | None = None
    """The split this document belongs to, or None to have it drawn from the name."""


def stdlib_documents() -> Iterator[Document]:
    """The modules of the running Python's standard library, without tests and data-like modules."""
    root = Path(sysconfig.get_path("stdlib"))
    paths = sorted(
        (path.relative_to(root).as_posix(), path)
        for path in _files_below(root, skip=_NOT_SOURCE, key="data.corpus")
        if path.suffix == ".py"
    )
    if not paths:
        raise ConfigError(
            f"data.corpus.type: 'stdlib' finds no .py files in '{root}'; "
            "use 'text' with data.corpus.paths"
        )
    return (Document(name, file_blocks(path, key="data.corpus")) for name, path in paths)


def text_documents(paths: Sequence[str]) -> Iterator[Document]:
    """The UTF-8 text files that `paths` (files, folders, globs) name, each once.

    A document is named by its path below the folder or below the fixed part of the glob, so that
    moving a corpus does not change its split. Raises ConfigError for a path that is not there, a
    named file that is not text, and where there is no text at all.
    """
    sources: dict[Path, _Source] = {}
    for source in chain.from_iterable(map(_sources, paths)):
        sources.setdefault(source.path.resolve(), source)
    _refuse_records(sources.values())
    if sources and not any(map(_size, sources)):
        what = "is empty" if len(sources) == 1 else f"has only empty files ({len(sources)})"
        raise ConfigError(
            f"data.corpus.paths: {_quoted(paths)} {what}; give a file with text in it"
        )
    num_documents = 0
    for source in sources.values():
        if source.is_text():
            yield Document(source.name, file_blocks(source.path))
            num_documents += 1
    if not num_documents:
        raise ConfigError(
            f"data.corpus.paths: {_quoted(paths)} has no UTF-8 text file that is not hidden"
        )


@dataclass(frozen=True)
class _Source:
    path: Path
    name: str
    explicit: bool
    """Named by the user, rather than found in a folder or by a glob."""

    def is_text(self) -> bool:
        """Whether the file is text; raises ConfigError where it is not and the user named it."""
        if _is_text(self.path):
            return True
        if self.explicit:
            raise ConfigError(
                f"data.corpus.paths: '{self.path}' is not UTF-8 text; "
                "convert it to UTF-8 or leave it out"
            )
        return False


def _refuse_records(sources: Iterable[_Source]) -> None:
    """ConfigError for a file of fields that the user named, or where nothing else was found."""
    found = [source.path for source in sources]
    named = [source.path for source in sources if source.explicit]
    for path in [*named, *found] if all(map(_not_plain_text, found)) else named:
        if why := _not_plain_text(path):
            raise ConfigError(f"data.corpus.paths: '{path}' {why}")


def _not_plain_text(path: Path) -> str:
    """Why a file with this name is no text to train on, and what to do; empty where it may be one."""
    suffix = path.suffix.lower()
    if suffix in _COMPRESSED:
        return f"is compressed ({suffix}); unpack it first"
    if suffix in _RECORDS:
        return (
            "holds records, whose brackets and names would be trained on; use --data.corpus.type "
            f"hf_dataset --data.corpus.path {path} --data.corpus.text_column NAME, or write their text "
            "into a .txt file"
        )
    return ""


def _sources(given: str) -> Iterator[_Source]:
    path = expand_path(given, "data.corpus.paths")
    if _is_file(path):
        yield _Source(path, path.name, explicit=True)
    elif path.is_dir() and path.resolve() == Path(path.resolve().anchor):
        raise ConfigError(
            f"data.corpus.paths: '{given}' is the whole file system; give the folder with the text"
        )
    elif path.is_dir():
        for name, file in sorted(
            (file.relative_to(path).as_posix(), file) for file in _files_below(path)
        ):
            yield _Source(file, name, explicit=False)
    elif path.exists():
        raise ConfigError(f"data.corpus.paths: '{given}' is neither a file nor a folder")
    elif path.is_symlink():
        raise ConfigError(
            f"data.corpus.paths: '{given}' is a symbolic link that leads nowhere; fix or remove it"
        )
    elif glob.has_magic(str(path)):
        yield from _matches(path, given)
    else:
        raise ConfigError(
            f"data.corpus.paths: '{given}' does not exist (looked in '{Path.cwd()}'); "
            "check the spelling"
        )


def _matches(pattern: Path, given: str) -> Iterator[_Source]:
    parts = pattern.parts
    fixed = next(i for i, part in enumerate(parts) if glob.has_magic(part))
    root = Path(*parts[:fixed])
    names = dict.fromkeys(
        path.relative_to(root).as_posix() for path in _matching(root, parts[fixed:])
    )
    if not names:
        raise ConfigError(
            f"data.corpus.paths: '{given}' matches no file; '**' searches folders within folders"
        )
    for name in sorted(names):
        yield _Source(root / name, name, explicit=False)


def _matching(folder: Path, parts: Sequence[str]) -> Iterator[Path]:
    """The files below `folder` that match a glob; hidden ones only where the glob has the dot.

    `**` enters no symbolic links, as `_files_below` does not, which `glob.glob` would: in a loop of
    links it comes to no end.
    """
    part, rest = parts[0], parts[1:]
    if part == "**":
        if not rest:
            yield from _files_below(folder)
            return
        yield from _matching(folder, rest)
        for inner in _entries(folder):
            if not inner.name.startswith(".") and inner.is_dir() and not inner.is_symlink():
                yield from _matching(inner, parts)
        return
    for entry in _entries(folder) if glob.has_magic(part) else [folder / part]:
        is_hidden = entry.name.startswith(".") and not part.startswith(".")
        if is_hidden or not fnmatch.fnmatch(entry.name, part):
            continue
        if rest and entry.is_dir():
            yield from _matching(entry, rest)
        elif not rest and _is_file(entry):
            yield entry


def _files_below(
    folder: Path, skip: frozenset[str] = frozenset(), key: str = "data.corpus.paths"
) -> Iterator[Path]:
    """The regular files below `folder`, in any order, without hidden ones and `skip` folders."""

    def refuse(error: OSError) -> None:
        raise _unreadable(Path(error.filename), error, key)

    for where, folders, files in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name not in skip and not name.startswith(".")]
        paths = (Path(where, name) for name in files if not name.startswith("."))
        yield from (path for path in paths if _is_file(path, key))


def _entries(folder: Path) -> list[Path]:
    """What is in a folder; nothing where it is none."""
    try:
        return list(folder.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise _unreadable(folder, error) from error


def _is_file(path: Path, key: str = "data.corpus.paths") -> bool:
    """Whether this is a regular file, or a link to one; ConfigError where one may not know."""
    try:
        return path.is_file()
    except OSError as error:
        raise _unreadable(path, error, key) from error


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError, key: str = "data.corpus.paths") -> ConfigError:
    return ConfigError(f"{key}: '{path}' cannot be read ({reason(error)})")


def _is_text(path: Path) -> bool:
    decoder = codecs.getincrementaldecoder("utf-8")()
    try:
        for block in file_blocks(path):
            if b"\0" in block:  # UTF-16 text is valid UTF-8 full of NULs
                return False
            decoder.decode(block)
        decoder.decode(b"", final=True)
    except UnicodeDecodeError:
        return False
    return True


def file_blocks(path: Path, key: str = "data.corpus.paths") -> Iterator[bytes]:
    """The content of a file in blocks; raises ConfigError naming `key` where it cannot be read."""
    try:
        with path.open("rb") as file:
            yield from blocks(file)
    except OSError as error:
        raise _unreadable(path, error, key) from error


def blocks(file: BinaryIO) -> Iterator[bytes]:
    """The content of `file` in blocks of at most BLOCK_BYTES, cut at the end of a line or a character."""
    rest = b""
    while True:
        block = rest + file.read(BLOCK_BYTES - len(rest))
        if len(block) < BLOCK_BYTES:
            break
        end = text_boundary(block, len(block)) or len(block)
        yield block[:end]
        rest = block[end:]
    if block:
        yield block


def text_boundary(text: bytes, at: int, reach: int = BLOCK_BYTES) -> int:
    """The last position up to `at` that ends a line or, with none within `reach`, a character.

    Characters are UTF-8; 0 where there is neither.
    """
    line_end = text.rfind(b"\n", max(0, at - reach), at) + 1
    if line_end:
        return line_end
    if at < len(text) and not _continues(text[at]):
        return at
    while at > 0 and _continues(text[at - 1]):
        at -= 1
    # The byte before `at` now ends a character, or opens one that lies across the position.
    return at - 1 if at > 0 and text[at - 1] >= 0xC0 else at


def _continues(byte: int) -> bool:
    return byte & 0xC0 == 0x80


def _quoted(paths: Sequence[str]) -> str:
    return ", ".join(f"'{path}'" for path in paths)
