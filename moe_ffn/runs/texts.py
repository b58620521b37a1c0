"""Texts to evaluate a trained model on: those of its run, or a file."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from moe_ffn.config.errors import ConfigError
from moe_ffn.data.corpus import text_documents
from moe_ffn.data.prepare import PreparedData, prepare
from moe_ffn.data.split import Documents, changed
from moe_ffn.data.token_files import SUFFIXES, TokenRow
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.files import read_object
from moe_ffn.runs.folder import DOCUMENTS_FILE
from moe_ffn.runs.reader import Run


def prepare_data(run: Run, instead: str) -> PreparedData:
    """The corpus and the splits that a run was trained on.

    Args:
        instead: what else a user may do where they are lost.

    Raises:
        ConfigError: the corpus cannot be read, or is not what it was.
    """
    try:
        data = prepare(run.config.data)
    except ConfigError as error:
        raise ConfigError(f"{error}; or {instead}") from error
    check_documents(run.folder, data.documents, instead)
    if run.facts.corpus_sha256 not in (None, data.corpus_sha256):  # where that list is lost
        raise ConfigError(
            f"data.corpus: is not what '{run.folder}' began with; put back what it was, or {instead}"
        )
    return data


def check_documents(folder: Path, now: Documents, instead: str = "start a new run") -> None:
    """Raise ConfigError with the first document that is not what the run began with.

    Args:
        instead: the alternative to putting the corpus back.
    """
    try:
        began_with = Documents.from_dict(read_object(folder / DOCUMENTS_FILE))
    except ConfigError:
        return
    if change := changed(began_with, now):
        raise ConfigError(
            f"data.corpus: {change}, since '{folder}' began; put back what it was, or {instead}"
        )


def tokens_of_path(path: Path, tokenizer: Tokenizer, option: str) -> np.ndarray:
    """The tokens of a file of token ids (.bin, .npy), or of all text that a path names.

    Between two documents stands an end of document, as in training; none behind the last.

    Args:
        path: a file, a folder or a glob, as in `data.corpus.paths`.
        option: that named it, for messages.

    Returns:
        (num_tokens,) ids of the tokenizer, two or more.

    Raises:
        ConfigError: it cannot be read, is no UTF-8 text, or holds too little, or ids of another tokenizer.
    """
    if path.suffix in SUFFIXES and path.exists():
        tokens = TokenRow.of([path], tokenizer.dtype)[:]
        if len(tokens) and not 0 <= tokens.min() <= tokens.max() < tokenizer.vocab_size:
            wrong = tokens.min() if tokens.min() < 0 else tokens.max()
            raise ConfigError(
                f"{option}: '{path}' holds the token {wrong}, but the model's tokenizer has a vocabulary of "
                f"{tokenizer.vocab_size}; give a file that this tokenizer made"
            )
    else:
        end = np.array([tokenizer.end_of_document], dtype=tokenizer.dtype)
        parts: list[np.ndarray] = []
        for document in text_documents([str(path)], option):
            parts += [end] if parts else []
            parts += tokenizer.encode_batch(list(document.blocks))
        tokens = np.concatenate(parts)
    if len(tokens) < 2:
        raise ConfigError(f"{option}: '{path}' has {len(tokens)} token; give a text of two or more")
    return tokens
