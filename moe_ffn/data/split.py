"""Which text is trained on and which is only ever validated on."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import get_args

import numpy as np

from moe_ffn.data.corpus import Document, Split, text_boundary
from moe_ffn.data.documents import MAX_NAMED, Documents
from moe_ffn.errors import ConfigError

_SPLITS: tuple[Split, ...] = get_args(Split)
_TRAIN, _VALIDATION, _LEFT_OUT = 0, 1, 2

_CLEARLY = 1.5
"""A share of the text that differs from the one asked for by this factor or more is said."""

_REACH_BYTES = 256
"""How far a cut may move back to a line end: a line is shorter, a text on one line is not lost."""


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """Where every document of a corpus goes; nine bytes of memory per document beyond 10,000.

    A document goes by `sha256(name) % 100 < validation_percent` unless it names its own split. A
    training document with the very content of a validation document is left out, so that nothing
    that is validated on was trained on; repeats within one split stay. Where that leaves a split
    empty (one or a few documents), the text is split by position: the last `validation_percent`
    percent of its bytes, from the start of a line where one is near, and repeated documents count
    once.
    """

    documents: Documents
    """What was read; equal for equal corpora, wherever they lie."""

    num_bytes: int
    """Bytes of text in the whole corpus, what is left out included."""

    notes: tuple[str, ...]
    """What a reader of the results should know about this split, one sentence each."""

    places: np.ndarray
    """(num_documents,) uint8: training, validation or left out."""

    fingerprints: np.ndarray
    """(num_documents,) uint64: the first bytes of each content's sha256."""

    cut: int | None
    """Where the split is by position, how many bytes come before validation."""


@dataclass(frozen=True)
class Piece:
    """A stretch of text in one split."""

    split: Split
    text: bytes
    """Empty where a document ends."""

    @property
    def ends_document(self) -> bool:
        return not self.text


def plan_split(documents: Iterable[Document], validation_percent: int) -> SplitPlan:
    """Reads a corpus once and says where each document goes.

    Raises ConfigError where there is no text, or none in a split that the documents name
    themselves.
    """
    corpus = hashlib.sha256()
    fingerprint_list, size_list, place_list = array("Q"), array("Q"), bytearray()
    digests: list[tuple[str, str]] = []
    named = False
    for document in documents:
        named |= document.split is not None
        name = hashlib.sha256(document.name.encode("utf-8", "surrogateescape")).digest()
        content, size = hashlib.sha256(), 0
        for block in document.blocks:
            content.update(block)
            size += len(block)
        if len(digests) <= MAX_NAMED:
            digests.append((document.name, content.hexdigest()))
        given = "none" if document.split is None else document.split
        corpus.update(name + content.digest() + given.encode().ljust(16))
        fingerprint_list.append(_fingerprint(content))
        size_list.append(size)
        place_list.append(_place(document.split, name, validation_percent) if size else _LEFT_OUT)

    fingerprints = np.frombuffer(fingerprint_list, dtype=np.uint64)
    sizes = np.frombuffer(size_list, dtype=np.uint64)
    places = np.frombuffer(place_list, dtype=np.uint8)
    if not sizes.any():
        raise ConfigError("data.corpus: there is no text in it; every document is empty")

    repeats = (places == _TRAIN) & np.isin(fingerprints, fingerprints[places == _VALIDATION])
    places[repeats] = _LEFT_OUT
    notes = _note_repeats(int(repeats.sum()))
    cut = None
    empty = [split for place, split in enumerate(_SPLITS) if not (places == place).any()]
    if empty and named:
        raise ConfigError(
            f"data.corpus: the {empty[0]} split holds no text that the other does not"
        )
    if empty:
        places = _first_of_each(fingerprints, sizes)
        kept = places == _TRAIN
        cut = int(sizes[kept].sum()) * (100 - validation_percent) // 100
        notes = (
            f"too few documents to split ({kept.sum()}): validation is the last "
            f"{validation_percent}% of the text",
        )
    elif not named:
        notes += _note_share(sizes, places, validation_percent)
    return SplitPlan(
        documents=Documents(
            corpus_sha256=corpus.hexdigest(),
            count=len(places),
            digests=tuple(digests) if len(places) <= MAX_NAMED else None,
        ),
        num_bytes=int(sizes.sum()),
        notes=notes,
        places=places,
        fingerprints=fingerprints,
        cut=cut,
    )


def split_pieces(documents: Iterable[Document], plan: SplitPlan) -> Iterator[Piece]:
    """The text of a corpus in order, each piece in its split.

    Raises ConfigError where the documents are no longer those the plan was made for.
    """
    position, index = 0, -1
    for index, document in enumerate(documents):
        if index == len(plan.places):
            raise _changed(document.name)
        place = plan.places[index]
        content = hashlib.sha256()
        split = _SPLITS[0] if place == _LEFT_OUT else _SPLITS[place]
        for block in document.blocks:
            content.update(block)
            if place == _LEFT_OUT:
                continue
            before = len(block) if plan.cut is None else _bytes_before(block, plan.cut - position)
            position += len(block)
            if block[:before]:
                yield Piece(split, block[:before])
            if block[before:]:
                split = "validation"
                yield Piece(split, block[before:])
        if _fingerprint(content) != plan.fingerprints[index]:
            raise _changed(document.name)
        if place != _LEFT_OUT:
            yield Piece(split, b"")
    if index + 1 != len(plan.places):
        raise _changed("the last document")


def _bytes_before(block: bytes, cut: int) -> int:
    """How much of `block` is training text where the cut is `cut` bytes from its start."""
    if cut >= len(block):
        return len(block)
    return text_boundary(block, cut, reach=_REACH_BYTES) if cut > 0 else 0


def _place(split: Split | None, name_digest: bytes, validation_percent: int) -> int:
    if split is not None:
        return _SPLITS.index(split)
    drawn = int.from_bytes(name_digest) % 100
    return _VALIDATION if drawn < validation_percent else _TRAIN


def _first_of_each(fingerprints: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Training for the first document of each content; repeats and empty ones left out."""
    places = np.full(len(fingerprints), _LEFT_OUT, dtype=np.uint8)
    _, first = np.unique(fingerprints, return_index=True)
    places[first] = _TRAIN
    places[sizes == 0] = _LEFT_OUT
    return places


def _note_repeats(count: int) -> tuple[str, ...]:
    if not count:
        return ()
    what = "1 document" if count == 1 else f"{count} documents"
    return (f"{what} left out of training: validation holds the same content",)


def _note_share(sizes: np.ndarray, places: np.ndarray, validation_percent: int) -> tuple[str, ...]:
    """Where documents differ in size or are few, their share of the text is not what was asked for."""
    train, validation = (int(sizes[places == place].sum()) for place in (_TRAIN, _VALIDATION))
    percent = 100 * validation / (train + validation)
    if 1 / _CLEARLY < percent / validation_percent < _CLEARLY:
        return ()
    count = int(np.count_nonzero(places != _LEFT_OUT))
    return (
        f"validation is {percent:.3g}% of the text ({validation_percent}% asked for): documents are drawn "
        f"whole, and there are {count:,}",
    )


def _fingerprint(content: hashlib._Hash) -> int:
    return int.from_bytes(content.digest()[:8])


def _changed(name: str) -> ConfigError:
    return ConfigError(f"data.corpus: '{name}' changed while it was being read; start again")
