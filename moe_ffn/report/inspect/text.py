"""Text for an inspection: windows of a text, and properties of each token.

W windows of S tokens in T = W * S, A bytes of a document
"""

from __future__ import annotations

import hashlib
import io
import keyword
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np

from moe_ffn.config.errors import ConfigError
from moe_ffn.data.batches import spread_starts
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.report.trace import visible
from moe_ffn.runs.reader import Run
from moe_ffn.runs.texts import prepare_data, read_text_bytes

BYTE_CLASSES = ("letter", "digit", "space", "newline", "punctuation", "non-ASCII", "end")
SYNTAX_CLASSES = (
    *("keyword", "name", "operator", "number", "string", "comment"),
    *("indentation", "space", "newline", "unknown"),
)
_UNKNOWN = SYNTAX_CLASSES.index("unknown")

_ADVICE = "give a text with --text"

MAX_DOCUMENT, LOOK_BACK = 1 << 21, 4096
"""Both in tokens. A longer document is read only in the windows and LOOK_BACK tokens before each, to find the
start of the line; its syntax is unknown."""

CHUNK = 1 << 22
"""Tokens read at once."""


@dataclass(frozen=True, eq=False)
class TokenizedText:
    """Windows of a text. Arrays (T,) have an entry for each token of all windows."""

    tokenizer: Tokenizer
    source: str
    """Name of the text, for messages and pages."""
    seq_len: int
    """S, tokens per window."""
    ids_T: np.ndarray
    next_T: np.ndarray
    """Id of the next token."""
    column_T: np.ndarray
    """Tokens since the start of the line."""
    document_T: np.ndarray
    """Index in `documents`."""
    documents: tuple[str, ...]
    """Names of the documents, or numbers if the corpus has no names."""
    byte_class_T: np.ndarray
    """Index in `BYTE_CLASSES`."""
    syntax_T: np.ndarray | None
    """Index in `SYNTAX_CLASSES`; None unless the text is known to be Python source."""
    no_syntax: str = ""
    """Reason why `syntax_T` is None; empty otherwise."""

    def __len__(self) -> int:
        return len(self.ids_T)

    @property
    def position_T(self) -> np.ndarray:
        """Return the position in the window."""
        return np.arange(len(self)) % self.seq_len

    @property
    def windows(self) -> np.ndarray:
        """Return the token ids as windows, (W, S)."""
        return self.ids_T.reshape(-1, self.seq_len)

    def token(self, token_id: int) -> str:
        return visible(self.tokenizer.token_bytes[token_id])

    def suffixes(self, longest: int) -> Iterator[np.ndarray]:
        """Yield labels (T,) for n = 1 to `longest`: tokens with equal last n tokens have equal labels."""
        labels = self.ids_T.astype(np.int64)
        yield labels
        _, own = np.unique(labels, return_inverse=True)
        base, labels = int(own.max()) + 1, own
        for n in range(2, longest + 1):
            pairs = np.roll(labels, 1).astype(np.int64) * base + own
            _, labels = np.unique(pairs, return_inverse=True)
            cut = self.position_T < n - 1  # a suffix that starts before the window is unique
            yield np.where(cut, -1 - np.arange(len(self)), labels)


def text_of_run(run: Run, num_tokens: int) -> TokenizedText:
    """Return windows spread over a run's validation split; ConfigError if its corpus is lost or changed."""
    config, data = run.config.data, prepare_data(run, _ADVICE)
    names = {digest: name for name, digest in data.documents.digests or ()}
    is_python = config.corpus.type == "stdlib"
    return text_of_tokens(
        data.validation[:],
        run.tokenizer,
        config.seq_len,
        num_tokens,
        source="validation split",
        names=names,
        no_syntax="" if is_python else "the corpus is not known to be Python source",
    )


def text_of_file(run: Run, path: Path, num_tokens: int) -> TokenizedText:
    """Return windows of a text file, spread evenly; ConfigError without two tokens that can be read."""
    content = read_text_bytes(path)
    ids = run.tokenizer.encode(content).numpy()
    if len(ids) < 2:
        raise ConfigError(f"--text: '{path}' has {len(ids)} tokens; give a text of two or more")
    no_syntax = "" if path.suffix == ".py" else f"the name of '{path.name}' does not end in .py"
    names = {hashlib.sha256(content).hexdigest(): path.name}
    return text_of_tokens(
        ids,
        run.tokenizer,
        run.config.data.seq_len,
        num_tokens,
        source=path.name,
        names=names,
        no_syntax=no_syntax,
    )


def text_of_tokens(
    tokens: np.ndarray,
    tokenizer: Tokenizer,
    seq_len: int,
    num_tokens: int,
    *,
    source: str = "tokens",
    names: Mapping[str, str] = MappingProxyType({}),
    no_syntax: str = "",
) -> TokenizedText:
    """Return windows of two or more token ids, evenly spread; the ids may be memory-mapped.

    Each document ends with an end of document. `num_tokens`, of all windows, is rounded up to whole windows.
    `names` maps the sha256 of a document to its name. A reason in `no_syntax` leaves the text unparsed;
    without one it is Python source.
    """
    seq_len = min(seq_len, len(tokens) - 1)
    starts = spread_starts(len(tokens), seq_len, max(-(-num_tokens // seq_len), 1))
    ends = np.append(_places_of(tokens, tokenizer.end_of_document), len(tokens) - 1)
    firsts = np.concatenate([[0], ends[:-1] + 1])
    class_of_token, class_byte = _classes(tokenizer)
    pieces: list[tuple[np.ndarray, np.ndarray, np.ndarray]] = []
    documents: dict[str, int] = {}
    first, last, name = 0, 0, ""
    column_A = syntax_A = np.empty(0, dtype=np.int64)
    for start in starts.tolist():
        place = start
        while place < start + seq_len:
            if not first <= place < last:
                number = int(np.searchsorted(ends, place))
                first, last = int(firsts[number]), int(ends[number]) + 1
                is_whole = last - first <= MAX_DOCUMENT
                if not is_whole:
                    first, last = max(first, place - LOOK_BACK), min(last, start + seq_len)
                ids = np.asarray(tokens[first:last], dtype=np.int64)
                blob, offset_A = _bytes_of(ids, tokenizer)
                name = names.get(hashlib.sha256(blob).hexdigest(), f"document {number}")
                column_A = _columns(ids, tokenizer)
                syntax_A = np.full(len(ids), _UNKNOWN)
                if is_whole and not no_syntax:
                    at = np.minimum(offset_A + class_byte[ids], len(blob))
                    syntax_A = np.append(syntax_of(blob), _UNKNOWN)[at]
            stop = min(start + seq_len, last)
            inside = slice(place - first, stop - first)
            document = np.full(stop - place, documents.setdefault(name, len(documents)))
            pieces.append((column_A[inside], syntax_A[inside], document))
            place = stop
    column_T, syntax_T, document_T = (
        np.concatenate(arrays) for arrays in zip(*pieces, strict=True)
    )
    window = np.arange(seq_len)
    ids_T = np.asarray(tokens)[(starts[:, None] + window).ravel()].astype(np.int64)
    next_T = np.asarray(tokens)[(starts[:, None] + window + 1).ravel()].astype(np.int64)
    return TokenizedText(
        tokenizer=tokenizer,
        source=source,
        seq_len=seq_len,
        ids_T=ids_T,
        next_T=next_T,
        column_T=column_T,
        document_T=document_T,
        documents=tuple(documents),
        byte_class_T=class_of_token[ids_T],
        syntax_T=None if no_syntax else syntax_T,
        no_syntax=no_syntax,
    )


def _places_of(tokens: np.ndarray, token_id: int) -> np.ndarray:
    starts = range(0, len(tokens), CHUNK)
    return np.concatenate([np.flatnonzero(tokens[a : a + CHUNK] == token_id) + a for a in starts])


def _bytes_of(ids: np.ndarray, tokenizer: Tokenizer) -> tuple[bytes, np.ndarray]:
    """Return the bytes of a document, and the offset of each token."""
    lengths = tokenizer.byte_lengths[ids]
    blob = b"".join(tokenizer.token_bytes[token_id] for token_id in ids.tolist())
    return blob, np.cumsum(lengths) - lengths


def _columns(ids: np.ndarray, tokenizer: Tokenizer) -> np.ndarray:
    """Return the number of tokens before each token in its line; a newline belongs to the line before."""
    ends_line = np.array([b"\n" in token for token in tokenizer.token_bytes])[ids]
    places = np.arange(len(ids))
    last = np.maximum.accumulate(np.where(ends_line, places, -1))
    return places - np.concatenate([[-1], last[:-1]]) - 1


def _classes(tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Return the byte class of each token of the vocabulary, and the index of the byte that determines it.

    This byte is the first that is neither a space nor a tab, or else the last.
    """
    classes, places = [], []
    for token in tokenizer.token_bytes:
        place = min(len(token) - len(token.lstrip(b" \t")), max(len(token) - 1, 0))
        classes.append(BYTE_CLASSES.index(_byte_class(token[place : place + 1])))
        places.append(place)
    return np.array(classes), np.array(places)


def _byte_class(byte: bytes) -> str:
    if not byte:
        return "end"
    if byte >= b"\x80":
        return "non-ASCII"
    if byte.isalpha():
        return "letter"
    if byte.isdigit():
        return "digit"
    if byte in b"\n\r":
        return "newline"
    return "space" if byte in b" \t\f\v" else "punctuation"


_SYNTAX_OF_TYPE = {"OP": "operator", "NL": "newline", "FSTRING": "string"}
"""First word of the name of a token's type -> its class, if that is not the word in lower case.

From Python 3.12 on, an f-string consists of several tokens, such as FSTRING_START.
"""


def syntax_of(source: bytes) -> np.ndarray:
    """Return the index in `SYNTAX_CLASSES` of each byte of Python source, (A,), from Python's `tokenize`.

    White space before the first token of a line is indentation. Everything after a syntax error is unknown.
    """
    text = source.decode("utf-8", errors="surrogateescape")
    lines = io.StringIO(text, newline="").readlines()
    starts = np.cumsum([0, *(len(line.encode("utf-8", "surrogateescape")) for line in lines)])
    classes = np.full(len(source), SYNTAX_CLASSES.index("space"), dtype=np.uint8)
    for line, start in zip(lines, starts.tolist(), strict=False):
        classes[start : start + len(line) - len(line.lstrip(" \t\f"))] = SYNTAX_CLASSES.index(
            "indentation"
        )

    def place(row: int, column: int) -> int:
        if row > len(lines):
            return len(source)
        line = lines[row - 1]
        return int(starts[row - 1]) + len(line[:column].encode("utf-8", "surrogateescape"))

    end = 0
    try:
        for token in tokenize.generate_tokens(iter(lines).__next__):
            word = tokenize.tok_name[token.type].partition("_")[0]
            kind = _SYNTAX_OF_TYPE.get(word, word.lower())
            if kind == "name" and keyword.iskeyword(token.string):
                kind = "keyword"
            begin, end = place(*token.start), place(*token.end)
            if kind in SYNTAX_CLASSES:
                classes[begin:end] = SYNTAX_CLASSES.index(kind)
    except (tokenize.TokenError, SyntaxError):
        classes[end:] = _UNKNOWN
    return classes
