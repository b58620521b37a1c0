"""From a corpus to memory-mapped token ids, once per content of the corpus."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

import numpy as np

from moe_ffn.data.cache import building, read_meta, seal, write_json, writing_to
from moe_ffn.data.config import DataConfig
from moe_ffn.data.documents import Documents
from moe_ffn.data.encode import SplitSize, encode_splits
from moe_ffn.data.progress import Report, showing, watched
from moe_ffn.data.split import Piece, SplitPlan, plan_split, split_pieces
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.data.windows import require_window
from moe_ffn.errors import ConfigError, expand_path
from moe_ffn.files import read_bytes

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
