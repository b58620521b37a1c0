"""Preparation of a corpus: text is encoded once, and its token ids are memory-mapped."""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from moe_ffn.config.base import MAX_COUNT, Config
from moe_ffn.config.errors import ConfigError, expand_path
from moe_ffn.config.files import read_bytes, read_object, write_file
from moe_ffn.data.batches import ValidationBatches, require_window
from moe_ffn.data.cache import building, read_meta, seal, write_cache_json, writing
from moe_ffn.data.corpus import TEXT_HINT, CorpusConfig, Split, StdlibConfig, TokenFiles
from moe_ffn.data.split import MAX_NAMED, Documents, Piece, SplitPlan, plan_split, split_pieces
from moe_ffn.data.token_files import TokenSequence
from moe_ffn.data.tokenizer import BytesConfig, Tokenizer, TokenizerConfig

log = logging.getLogger(__name__)


class DataConfig(Config, frozen=True):
    """Text, tokenizer, and how the tokens are cut into batches."""

    wrong_value_hint: ClassVar[str] = TEXT_HINT

    corpus: CorpusConfig = StdlibConfig()
    """Source of the text."""
    tokenizer: TokenizerConfig = BytesConfig()
    """Rule that turns text into token ids."""
    seq_len: int = Field(default=256, ge=1, le=MAX_COUNT)
    """Tokens per sequence."""
    batch_size: int = Field(default=16, ge=1, le=MAX_COUNT)
    """Sequences per forward pass, summed over all ranks."""
    validation_percent: int = Field(default=5, ge=1, le=50)
    """Percent of the documents to hold out for validation; their share of the text may differ."""
    validation_tokens: int = Field(default=131_072, ge=1, le=MAX_COUNT)
    """Number of tokens to predict in each validation, in sequences spread evenly over the split."""
    cache_dir: str = Field(default="~/.cache/moe_ffn", min_length=1)
    """Folder that caches the encoded tokens between runs."""

    @property
    def text_sizes(self) -> tuple[int, int]:
        """Largest possible vocabulary size, and sequence length, for building a decoder."""
        return self.tokenizer.max_vocab_size, self.seq_len


_FORMAT = 2
"""Version in the cache key; increment it when the same corpus and config give other files."""

_TOKENIZER_TRAINING_BYTES = 256 << 20
"""Size of a corpus in bytes above which a tokenizer is trained only on every n-th piece."""

_ENCODED_AT_ONCE = 1 << 20
"""Bytes of text per call of the tokenizer, which may spread them over cores."""


@dataclass
class SplitSize:
    """The size of one split."""

    num_documents: int = 0
    """Documents with some text in this split."""
    num_bytes: int = 0
    num_tokens: int = 0
    """Tokens, including an end-of-document token for each document that ends in this split."""


@dataclass(frozen=True, eq=False)
class PreparedData:
    """Both splits of a corpus as token ids; an end-of-document token follows each document."""

    train: np.memmap | TokenSequence
    """(num_tokens,) uint16, or uint32 for a vocabulary above 65,536; token files keep their own dtype."""
    validation: np.memmap | TokenSequence
    """(num_tokens,) of the same dtype."""
    tokenizer: Tokenizer
    train_size: SplitSize
    validation_size: SplitSize
    documents: Documents
    """Documents that were read; `moe_ffn.data.split.changed` compares them with those of another run."""
    notes: tuple[str, ...]
    """Sentences about unusual properties of the split."""
    folder: Path
    """Folder in the cache with both splits and the tokenizer, or folder of the first token file."""

    @property
    def corpus_sha256(self) -> str:
        """Digest of the corpus; compare losses only if it is equal."""
        return self.documents.corpus_sha256


def prepare(config: DataConfig) -> PreparedData:
    """Read, split and encode the corpus, or return the result from `data.cache_dir`, unless the name, size or
    time of a file changed. Several processes may do so at once; memory grows by about 20 bytes per document.
    ConfigError if the corpus cannot be read or is too short, or the cache cannot be written.
    """
    if (files := config.corpus.token_files()) is not None:
        return _from_token_files(config, files)
    cache_dir = expand_path(config.cache_dir, "data.cache_dir")
    stamp = config.corpus.stamp()
    documents = _known_documents(cache_dir, stamp)
    folder = documents and cache_dir / _key(config, documents.corpus_sha256)
    meta = folder and read_meta(folder)
    if documents is None or folder is None or meta is None:
        documents, folder, meta = _read_and_build(config, cache_dir)
        if stamp is not None and stamp == config.corpus.stamp():
            with contextlib.suppress(OSError):  # on failure, the corpus is read again next time
                text = json.dumps(documents.to_dict())
                write_file(cache_dir / _KNOWN, f"{stamp}.json", text)
    for note in meta["notes"]:
        log.info("data: %s", note)
    sizes = {split: SplitSize(**size) for split, size in meta["splits"].items()}
    for split, size in sizes.items():
        require_window(config.seq_len, size.num_tokens, f"the {split} split")
    tokenizer = config.tokenizer.restore(json.loads(read_bytes(folder / "tokenizer.json")))
    return PreparedData(
        train=np.memmap(folder / "train.bin", dtype=tokenizer.dtype, mode="r"),
        validation=np.memmap(folder / "validation.bin", dtype=tokenizer.dtype, mode="r"),
        tokenizer=tokenizer,
        train_size=sizes["train"],
        validation_size=sizes["validation"],
        documents=documents,
        notes=tuple(meta["notes"]),
        folder=folder,
    )


def validation_batches(config: DataConfig, data: PreparedData) -> ValidationBatches:
    """Return the batches of every validation; the unigram baseline predicts the same tokens."""
    return ValidationBatches(
        data.validation,
        seq_len=config.seq_len,
        batch_size=config.batch_size,
        num_tokens=config.validation_tokens,
    )


def _read_and_build(config: DataConfig, cache_dir: Path) -> tuple[Documents, Path, dict[str, Any]]:
    """Build the cache folder; return the documents of the corpus, the folder and its metadata."""
    log.info("data: reading the corpus")
    plan = plan_split(config.corpus.documents(), config.validation_percent)
    folder = cache_dir / _key(config, plan.documents.corpus_sha256)
    meta = read_meta(folder)
    if meta is None:
        log.info("data: preparing %.1f MB of text", plan.num_bytes / 1e6)
        _build(config, plan, folder)
        meta = read_meta(folder)
    assert meta is not None, f"'{folder}' was just written"
    return plan.documents, folder, meta


_KNOWN = "known_corpora"
"""Folder in the cache with a file per corpus: its stamp names the file, which lists its documents."""


def _known_documents(cache_dir: Path, stamp: str | None) -> Documents | None:
    if stamp is None:
        return None
    with contextlib.suppress(ConfigError):  # the file is missing or damaged
        return Documents.from_dict(read_object(cache_dir / _KNOWN / f"{stamp}.json"))
    return None


def _from_token_files(config: DataConfig, files: TokenFiles) -> PreparedData:
    """Return data that reads the token files in place; read only enough here to identify the files."""
    tokenizer = config.tokenizer.build(())
    dtype = files.dtype or tokenizer.dtype
    train = TokenSequence.of(files.train, dtype)
    digests = train.digests()
    if files.validation is None:
        cut = len(train) * (100 - config.validation_percent) // 100
        train, validation = train.part(0, cut), train.part(cut, len(train))
    else:
        validation = TokenSequence.of(files.validation, dtype)
        digests += validation.digests()
    for split, row in (("train", train), ("validation", validation)):
        require_window(config.seq_len, len(row), f"the {split} split")
    for file in digests:
        if file.smallest < 0:
            raise ConfigError(
                f"data.corpus: '{file.path}' holds the token {file.smallest}; leave out padding, since ids "
                "begin at 0"
            )
        if file.largest >= tokenizer.vocab_size:
            raise ConfigError(
                f"data.corpus: '{file.path}' holds the token {file.largest}, but data.tokenizer has a "
                f"vocabulary of {tokenizer.vocab_size}; give the tokenizer that made the file: "
                "data.tokenizer {type: file, path: tokenizer.json}"
            )
    named_digests = tuple((file.path.name, file.sha256) for file in digests)
    identity = json.dumps([named_digests, len(train), files.validation is None])
    return PreparedData(
        train=train,
        validation=validation,
        tokenizer=tokenizer,
        train_size=SplitSize(num_tokens=len(train)),
        validation_size=SplitSize(num_tokens=len(validation)),
        documents=Documents(
            corpus_sha256=hashlib.sha256(identity.encode()).hexdigest(),
            count=len(digests),
            digests=named_digests if len(digests) <= MAX_NAMED else None,
        ),
        notes=(),
        folder=files.train[0].parent,
    )


def cached_validation(config: DataConfig, corpus_sha256: str) -> np.ndarray | None:
    """Return the cached validation split as token ids, (num_tokens,); None if it is missing or damaged."""
    folder = expand_path(config.cache_dir, "data.cache_dir") / _key(config, corpus_sha256)
    name = "validation.bin"
    meta = read_meta(folder, only=name)
    if meta is None:
        return None
    return np.fromfile(folder / name, dtype=meta["dtype"])


def _key(config: DataConfig, corpus_sha256: str) -> str:
    """Return a digest of all that determines the tokens: content and names, tokenizer, split."""
    parts = {
        "format": _FORMAT,
        "corpus": corpus_sha256,
        "tokenizer": config.tokenizer.identity(),
        "validation_percent": config.validation_percent,
    }
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _build(config: DataConfig, plan: SplitPlan, folder: Path) -> None:
    """Encode the corpus into `folder`, which appears atomically."""
    pieces = split_pieces(config.corpus.documents(), plan)
    train = (piece.text for piece in pieces if piece.split == "train" and piece.text)
    every_nth = -(-plan.num_bytes // _TOKENIZER_TRAINING_BYTES)
    tokenizer = config.tokenizer.build(islice(train, 0, None, every_nth))
    with building(folder) as built:
        sizes = _encode(split_pieces(config.corpus.documents(), plan), tokenizer, built)
        meta = {
            "corpus_sha256": plan.documents.corpus_sha256,
            "dtype": tokenizer.dtype.name,
            "notes": plan.notes,
            "splits": {split: asdict(size) for split, size in sizes.items()},
        }
        with writing(built):
            write_cache_json(built / "tokenizer.json", tokenizer.to_dict())
            seal(built, meta)


def _encode(pieces: Iterable[Piece], tokenizer: Tokenizer, folder: Path) -> dict[Split, SplitSize]:
    """Write `train.bin` and `validation.bin`, arrays of `tokenizer.dtype`; return their sizes."""
    sizes: dict[Split, SplitSize] = {"train": SplitSize(), "validation": SplitSize()}
    within_document = dict.fromkeys(sizes, False)
    end_of_document = np.array([tokenizer.end_of_document], dtype=tokenizer.dtype)
    for batch in _batched(pieces):
        encoded = tokenizer.encode_batch([piece.text for piece in batch])
        # No text is read inside `writing`, so that read errors are not reported as write errors.
        with writing(folder), contextlib.ExitStack() as stack:
            files = {
                split: stack.enter_context((folder / f"{split}.bin").open("ab")) for split in sizes
            }
            for piece, text_ids in zip(batch, encoded, strict=True):
                ids = end_of_document if piece.ends_document else text_ids
                files[piece.split].write(ids.tobytes())
                size = sizes[piece.split]
                size.num_documents += not within_document[piece.split]
                size.num_bytes += len(piece.text)
                size.num_tokens += len(ids)
                within_document[piece.split] = not piece.ends_document
    return sizes


def _batched(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Group pieces into lists of about `_ENCODED_AT_ONCE` bytes."""
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
