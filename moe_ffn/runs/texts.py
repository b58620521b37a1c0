"""Texts for the evaluation of a trained model: the data of its run, or another file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moe_ffn.config.errors import ConfigError, expand_path
from moe_ffn.config.files import read_object, reason
from moe_ffn.data.corpus import read_text_documents
from moe_ffn.data.prepare import DataConfig, PreparedData, prepare
from moe_ffn.data.split import Documents, changed
from moe_ffn.data.token_files import SUFFIXES, TokenSequence
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.runs.folder import DOCUMENTS_FILE
from moe_ffn.runs.reader import Run


def prepare_data(run: Run, instead: str, config: DataConfig | None = None) -> PreparedData:
    """Return the corpus and the splits that a run was trained on, by default with its own options.

    Raises ConfigError, with the alternative `instead`, if the corpus cannot be read, or has changed since the
    run began.
    """
    try:
        data = prepare(config or run.config.data)
    except ConfigError as error:
        raise ConfigError(f"{error}; or {instead}") from error
    check_documents(run.folder, data.documents, instead)
    if run.facts.corpus_sha256 not in (None, data.corpus_sha256):  # if `documents.json` is lost
        raise ConfigError(
            f"data.corpus: differs from the text that '{run.folder}' was started with; "
            f"restore it, or {instead}"
        )
    return data


def check_documents(folder: Path, documents: Documents, instead: str = "start a new run") -> None:
    """Raise ConfigError if a document has changed since the run in `folder` began."""
    try:
        original = Documents.from_dict(read_object(folder / DOCUMENTS_FILE))
    except ConfigError:  # the file is missing or damaged
        return
    if change := changed(original, documents):
        raise ConfigError(
            f"data.corpus: {change}, since '{folder}' began; restore it, or {instead}"
        )


def read_text_bytes(path: Path, limit: int | None = None) -> bytes:
    """Return at most `limit` bytes of a text file; ConfigError if it cannot be read."""
    path = expand_path(str(path), "--text")
    try:
        with path.open("rb") as file:
            return file.read(-1 if limit is None else limit)
    except OSError as error:
        raise ConfigError(f"--text: '{path}' cannot be read ({reason(error)})") from error


def tokens_of_path(path: Path, tokenizer: Tokenizer, option: str) -> np.ndarray:
    """Return the tokens of a file of token ids (.bin, .npy), or of all texts under a path, (num_tokens,).

    An end-of-document token separates documents, like in training, which leaves out empty ones; none follows
    the last document. Raises ConfigError, naming the `option`, if the path cannot be read, is not UTF-8 text,
    has fewer than two tokens, or has ids of another tokenizer.
    """
    if path.suffix in SUFFIXES and path.exists():
        tokens = TokenSequence.of([path], tokenizer.dtype)[:]
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < tokenizer.vocab_size:
            invalid = tokens.min() if tokens.min() < 0 else tokens.max()
            raise ConfigError(
                f"{option}: '{path}' holds the token {invalid}, but the model's tokenizer has a vocabulary "
                f"of {tokenizer.vocab_size}; give a file that this tokenizer made"
            )
    else:
        end = np.array([tokenizer.end_of_document], dtype=tokenizer.dtype)
        parts: list[np.ndarray] = []
        for document in read_text_documents([str(path)], option):
            if blocks := list(document.blocks):
                parts += [end] if parts else []
                parts += tokenizer.encode_batch(blocks)
        tokens = np.concatenate(parts)
    if len(tokens) < 2:
        raise ConfigError(f"{option}: '{path}' has {len(tokens)} token; give a text of two or more")
    return tokens
