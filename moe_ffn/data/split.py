"""Split of a corpus into training and validation text, and detection of changes since an earlier run."""

from __future__ import annotations

import hashlib
from array import array
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, get_args

import numpy as np
from pydantic import TypeAdapter, ValidationError

from moe_ffn.config.errors import ConfigError
from moe_ffn.data.corpus import Document, Split, text_boundary

MAX_NAMED = 10_000
"""Maximum number of documents whose names and digests are stored, which takes a megabyte."""

_SPLITS: tuple[Split, ...] = get_args(Split)
_TRAIN, _VALIDATION, _LEFT_OUT = 0, 1, 2

_REACH_BYTES = 256
"""Maximum bytes by which a cut moves back to the end of a line."""


@dataclass(frozen=True)
class Documents:
    """The documents of a corpus when it was read."""

    corpus_sha256: str
    """Digest of every name, content and given split."""

    count: int

    digests: tuple[tuple[str, str], ...] | None
    """Name and sha256 of each document in order; None for more than 10,000 documents."""

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON, which `from_dict` reads."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Documents:
        """Return documents from the values of `to_dict`; ConfigError if they are damaged."""
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            raise ConfigError("the list of documents is damaged") from error


def changed(before: Documents, now: Documents) -> str | None:
    """Describe how the documents changed, naming the first change; None if they are equal.

    Example: `'b.txt' was removed, and 2 other documents differ too`
    """
    if before.corpus_sha256 == now.corpus_sha256:
        return None
    if before.digests is None or now.digests is None:
        had = f" and had {before.count:,}" if now.count != before.count else ", as many as before"
        return f"the corpus changed: it has {now.count:,} documents{had}"
    contents: list[dict[str, list[str]]] = []
    for digests in (before.digests, now.digests):
        contents.append(by_name := defaultdict(list))  # a name need not be unique
        for name, digest in digests:
            by_name[name].append(digest)
    old, new = contents
    found = [
        f"'{name}' has changed" if name in new else f"'{name}' was removed"
        for name in old
        if new.get(name) != old[name]
    ]
    found += [f"'{name}' is new" for name in new if name not in old]
    if not found:
        return "the documents come in another order, or in other splits, than before"
    others = len(found) - 1
    more = f", and {others:,} other document{'s differ' if others > 1 else ' differs'} too"
    return found[0] + (more if others else "")


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """Split of every document of a corpus, in nine bytes of memory per document beyond 10,000.

    A document is in the validation split if `sha256(name) % 100 < validation_percent`, unless it names its
    own split. A training document with the content of a validation document is left out; repeats within one
    split stay. If a split would be empty (one or a few documents), the text is split by position: validation
    is the last `validation_percent` percent of the bytes, from the start of a line if one is near. Repeated
    documents are then used once.
    """

    documents: Documents
    """Documents that were read."""

    num_bytes: int
    """Size of the whole corpus in bytes, including documents that are left out."""

    notes: tuple[str, ...]
    """Sentences about unusual properties of the split."""

    places: np.ndarray
    """(num_documents,) uint8: `_TRAIN`, `_VALIDATION` or `_LEFT_OUT`."""

    fingerprints: np.ndarray
    """(num_documents,) uint64: the first bytes of each content's sha256."""

    cut: int | None
    """Bytes before the validation text; None unless the text is split by position."""


@dataclass(frozen=True)
class Piece:
    """Consecutive text in one split."""

    split: Split
    text: bytes
    """Empty at the end of a document."""

    @property
    def ends_document(self) -> bool:
        return not self.text


def plan_split(documents: Iterable[Document], validation_percent: int) -> SplitPlan:
    """Read a corpus once and assign every document to a split.

    Raises:
        ConfigError: there is no text, or the documents name their splits and one split is empty.
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
        corpus.update(name + content.digest() + (document.split or "none").encode().ljust(16))
        fingerprint_list.append(_fingerprint(content))
        size_list.append(size)
        drawn = "validation" if int.from_bytes(name) % 100 < validation_percent else "train"
        place_list.append(_SPLITS.index(document.split or drawn) if size else _LEFT_OUT)

    fingerprints = np.frombuffer(fingerprint_list, dtype=np.uint64)
    sizes = np.frombuffer(size_list, dtype=np.uint64)
    places = np.frombuffer(place_list, dtype=np.uint8)
    if not sizes.any():
        raise ConfigError("data.corpus: no text found; every document is empty")

    repeats = (places == _TRAIN) & np.isin(fingerprints, fingerprints[places == _VALIDATION])
    places[repeats] = _LEFT_OUT
    notes: list[str] = []
    cut = None
    empty = [split for place, split in enumerate(_SPLITS) if not (places == place).any()]
    if empty and named:
        raise ConfigError(
            f"data.corpus: every text of the {empty[0]} split is in the other split too; name other text for "
            "it"
        )
    if empty:
        _, first_of_content = np.unique(fingerprints, return_index=True)
        places[:] = _LEFT_OUT
        places[first_of_content] = _TRAIN
        places[sizes == 0] = _LEFT_OUT
        kept = places == _TRAIN
        cut = int(sizes[kept].sum()) * (100 - validation_percent) // 100
        notes.append(
            f"too few documents to split ({kept.sum()}): validation is the last "
            f"{validation_percent}% of the text"
        )
    else:
        if num_repeats := int(repeats.sum()):
            what = "1 document" if num_repeats == 1 else f"{num_repeats} documents"
            notes.append(f"{what} left out of training: validation holds the same content")
    return SplitPlan(
        documents=Documents(
            corpus_sha256=corpus.hexdigest(),
            count=len(places),
            digests=tuple(digests) if len(places) <= MAX_NAMED else None,
        ),
        num_bytes=int(sizes.sum()),
        notes=tuple(notes),
        places=places,
        fingerprints=fingerprints,
        cut=cut,
    )


def split_pieces(documents: Iterable[Document], plan: SplitPlan) -> Iterator[Piece]:
    """Yield the text of a corpus in order, in pieces that belong to one split.

    Raises:
        ConfigError: the documents changed since the plan was made.
    """
    position, index = 0, -1
    for index, document in enumerate(documents):
        if index == len(plan.places):
            raise _changed_meanwhile(document.name)
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
            raise _changed_meanwhile(document.name)
        if place != _LEFT_OUT:
            yield Piece(split, b"")
    if index + 1 != len(plan.places):
        raise _changed_meanwhile("the last document")


def _bytes_before(block: bytes, cut: int) -> int:
    """Return the number of bytes of `block` before the cut, which is `cut` bytes from its start."""
    if cut >= len(block):
        return len(block)
    return text_boundary(block, cut, reach=_REACH_BYTES) if cut > 0 else 0


def _fingerprint(content: hashlib._Hash) -> int:
    return int.from_bytes(content.digest()[:8])


def _changed_meanwhile(name: str) -> ConfigError:
    return ConfigError(f"data.corpus: '{name}' changed while it was being read; start again")
