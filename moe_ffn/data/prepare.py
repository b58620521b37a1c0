"""From a corpus to memory-mapped token ids, once per content of the corpus."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import BinaryIO

import numpy as np
from pydantic import Field

from moe_ffn.config import MAX_COUNT, Config
from moe_ffn.data.batches import require_window
from moe_ffn.data.cache import building, read_meta, seal, write_json, writing_to
from moe_ffn.data.corpus import CorpusConfig, Split, StdlibConfig
from moe_ffn.data.documents import Documents
from moe_ffn.data.progress import Report, showing, watched
from moe_ffn.data.split import Piece, SplitPlan, plan_split, split_pieces
from moe_ffn.data.tokenizer import BytesConfig, Tokenizer, TokenizerConfig
from moe_ffn.errors import ConfigError, expand_path
from moe_ffn.files import read_bytes


class DataConfig(Config, frozen=True):
    """Text, tokenizer, and how the tokens are cut into batches."""

    corpus: CorpusConfig = StdlibConfig()
    """Where the text comes from."""

    tokenizer: TokenizerConfig = BytesConfig()
    """How text becomes token ids."""

    seq_len: int = Field(default=256, ge=1, le=MAX_COUNT)
    """Tokens per sequence."""

    batch_size: int = Field(default=16, ge=1, le=MAX_COUNT)
    """Sequences per forward pass, summed over all ranks."""

    validation_percent: int = Field(default=5, ge=1, le=50)
    """Percent of the documents that are kept for validation, each whole; a line says where that is
    another share of the text."""

    validation_tokens: int = Field(default=131_072, ge=1, le=MAX_COUNT)
    """How many tokens each validation looks at, evenly spaced over the validation split."""

    cache_dir: str = Field(default="~/.cache/moe_ffn", min_length=1)
    """Where the encoded tokens are kept between runs."""


_FORMAT = 2
"""Part of the cache key: raise it when the same corpus and config would give other files."""


_TOKENIZER_TRAINING_BYTES = 256 << 20
"""Above this a tokenizer is trained on every n-th piece: its vocabulary hardly changes any more."""


@dataclass(frozen=True, eq=False)
class PreparedData:
    """The two splits of a corpus as token ids, each document followed by an end of document."""

    train: np.memmap
    """(num_tokens,) uint16, or uint32 for a vocabulary above 65,536; read-only."""

    validation: np.memmap
    """As `train`; nothing of it is trained on."""

    tokenizer: Tokenizer
    train_size: SplitSize
    validation_size: SplitSize

    documents: Documents
    """What was read; `moe_ffn.data.documents.changed` compares it with what another run read."""

    notes: tuple[str, ...]
    """What is unusual about the split, one sentence each."""

    folder: Path
    """Where all of this is kept."""

    @property
    def corpus_sha256(self) -> str:
        """Losses are comparable only where this is equal."""
        return self.documents.corpus_sha256


def prepare(config: DataConfig, progress: bool | Report = True) -> PreparedData:
    """Reads, splits and encodes the corpus, or finds that done in `data.cache_dir`.

    The corpus is always read, to know that it is the same. Memory does not grow with its size,
    but by some twenty bytes per document. Several processes may prepare the same data at the same time.

    `progress`: True shows it on stderr, False does not; a function is called with (stage, bytes
    done, bytes in all or None).

    Raises ConfigError where the corpus cannot be read or is shorter than one sequence, and where
    the cache cannot be written.
    """
    with showing(progress) as report:
        plan = plan_split(
            watched(config.corpus.documents(), report, "reading"), config.validation_percent
        )
        folder = expand_path(config.cache_dir, "data.cache_dir") / _key(config, plan)
        meta = read_meta(folder)
        if meta is None:
            _build(config, plan, folder, report)
            meta = read_meta(folder)
        if meta is None:
            raise ConfigError(
                f"data.cache_dir: '{folder}' does not hold what was just written there; "
                "name another folder, on a disk that does"
            )
    if progress is True:
        for note in meta["notes"]:
            print(f"data: {note}", file=sys.stderr, flush=True)
    sizes = {split: SplitSize(**meta["splits"][split]) for split in ("train", "validation")}
    for split, size in sizes.items():
        require_window(config.seq_len, size.num_tokens, f"the {split} split")
    tokenizer = config.tokenizer.restore(json.loads(read_bytes(folder / "tokenizer.json")))
    return PreparedData(
        train=np.memmap(folder / "train.bin", dtype=tokenizer.dtype, mode="r"),
        validation=np.memmap(folder / "validation.bin", dtype=tokenizer.dtype, mode="r"),
        tokenizer=tokenizer,
        train_size=sizes["train"],
        validation_size=sizes["validation"],
        documents=plan.documents,
        notes=tuple(meta["notes"]),
        folder=folder,
    )


def _key(config: DataConfig, plan: SplitPlan) -> str:
    """What the tokens depend on, digested: content and names, tokenizer, split."""
    parts = {
        "format": _FORMAT,
        "corpus": plan.documents.corpus_sha256,
        "tokenizer": config.tokenizer.to_dict(),
        "validation_percent": config.validation_percent,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _build(config: DataConfig, plan: SplitPlan, folder: Path, report: Report) -> None:
    """Encodes the corpus into `folder`, which appears whole or not at all."""

    def pieces(stage: str) -> Iterator[Piece]:
        documents = watched(config.corpus.documents(), report, stage, plan.num_bytes)
        yield from split_pieces(documents, plan)

    tokenizer = config.tokenizer.build(_sample(pieces("training the tokenizer"), plan.num_bytes))
    with building(folder) as built:
        splits = encode_splits(pieces("encoding"), tokenizer, built, folder.parent)
        meta = {
            "corpus_sha256": plan.documents.corpus_sha256,
            "dtype": tokenizer.dtype.name,
            "notes": plan.notes,
            "splits": {split: asdict(size) for split, size in splits.items()},
        }
        with writing_to(folder.parent):
            write_json(built / "tokenizer.json", tokenizer.to_dict())
            seal(built, meta)


def _sample(pieces: Iterable[Piece], num_bytes: int) -> Iterator[bytes]:
    """The training text, or evenly spaced pieces of it where it is more than a tokenizer needs."""
    train = (piece.text for piece in pieces if piece.split == "train" and piece.text)
    return islice(train, 0, None, -(-num_bytes // _TOKENIZER_TRAINING_BYTES))


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


WORSE_THAN_UNIGRAM = "worse than the unigram model, which only counts tokens: too short, or broken"
"""What is said of a run whose validation loss is above it."""


_CHUNK = 1 << 20


def unigram_loss(
    train_tokens: np.ndarray, validation_targets: np.ndarray, vocab_size: int
) -> float:
    """Mean nats per token of `validation_targets` under the add-one-smoothed frequencies of
    `train_tokens`.

    p(v) = (count(v) + 1) / (num_train_tokens + vocab_size). Both arrays are (num_tokens,) of ids
    below `vocab_size`; `ValidationBatches.targets` are the tokens a validation looks at.
    """
    train = _counts(train_tokens, vocab_size)
    validation = _counts(validation_targets, vocab_size)
    nats = np.log(len(train_tokens) + vocab_size) - np.log(train + 1)
    return float(validation @ nats / len(validation_targets))


def _counts(tokens: np.ndarray, vocab_size: int) -> np.ndarray:
    """How often each id occurs, (vocab_size,); in chunks, since bincount copies to int64."""
    counts = np.zeros(vocab_size, dtype=np.int64)
    for start in range(0, len(tokens), _CHUNK):
        counts += np.bincount(tokens[start : start + _CHUNK], minlength=vocab_size)
    return counts
