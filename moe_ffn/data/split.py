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
"""Maximum number of documents whose names and digests are stored, which takes about a megabyte."""

_SPLITS: tuple[Split, ...] = get_args(Split)
_TRAIN, _VALIDATION, _LEFT_OUT = 0, 1, 2

_REACH_BYTES = 256
"""Maximum bytes by which a cut moves back to the end of a line."""


@dataclass(frozen=True)
class Documents:
    """The documents of a corpus when it was read."""

    corpus_sha256: str
    """Digest of the name, content and given split of every document."""
    count: int
    digests: tuple[tuple[str, str], ...] | None
    """Name and sha256 of each document in order; None for more than 10,000 documents."""

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: Any) -> Documents:
        """Return documents from the values of `to_dict`; ConfigError if they are damaged."""
        try:
            return TypeAdapter(cls).validate_python(values)
        except ValidationError as error:
            raise ConfigError("the list of documents is damaged") from error


def changed(before: Documents, now: Documents) -> str | None:
    """Describe how the documents changed, such as `'b.txt' was removed, and 2 other documents differ too`;
    None if they are equal.
    """
    if before.corpus_sha256 == now.corpus_sha256:
        return None
    if before.digests is None or now.digests is None:
        is_same_count = now.count == before.count
        count_before = ", as many as before" if is_same_count else f" instead of {before.count:,}"
        return f"the corpus changed: it has {now.count:,} documents{count_before}"
    old: dict[str, list[str]] = defaultdict(list)  # lists, since a name need not be unique
    new: dict[str, list[str]] = defaultdict(list)
    for by_name, digests in ((old, before.digests), (new, now.digests)):
        for name, digest in digests:
            by_name[name].append(digest)
    changes = [
        f"'{name}' has changed" if name in new else f"'{name}' was removed"
        for name in old
        if new.get(name) != old[name]
    ]
    changes += [f"'{name}' is new" for name in new if name not in old]
    if not changes:
        return "the documents come in another order, or in other splits, than before"
    others = len(changes) - 1
    more = f", and {others:,} other document{'s differ' if others > 1 else ' differs'} too"
    return changes[0] + (more if others else "")


@dataclass(frozen=True, eq=False)
class SplitPlan:
    """Split of every document of a corpus, in nine bytes of memory per document beyond 10,000.

    A document is in the validation split if `sha256(name) % 100 < validation_percent`, unless it names its
    own split. A training document with the content of a validation document is left out; duplicates within
    one split stay. If a split would be empty (one or a few documents), the text is split by position:
    validation is the last `validation_percent` percent of the bytes, from the start of a line if one is near.
    Duplicates are then used once.
    """

    documents: Documents
    """Documents that were read."""
    num_bytes: int
    """Size of the whole corpus in bytes, including documents that are left out."""
    notes: tuple[str, ...]
    """Sentences about unusual properties of the split."""
    assigned: np.ndarray
    """(num_documents,) uint8: `_TRAIN`, `_VALIDATION` or `_LEFT_OUT`."""
    fingerprints: np.ndarray
    """(num_documents,) uint64: the first 8 bytes of the sha256 of each document's content."""
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
    """Read a corpus once and assign every document to a split; ConfigError if a given split has no text."""
    corpus = hashlib.sha256()
    fingerprint_list, size_list, assigned_list = array("Q"), array("Q"), bytearray()
    digests: list[tuple[str, str]] = []
    has_given_splits = False
    for document in documents:
        has_given_splits |= document.split is not None
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
        assigned_list.append(_SPLITS.index(document.split or drawn) if size else _LEFT_OUT)

    fingerprints = np.frombuffer(fingerprint_list, dtype=np.uint64)
    sizes = np.frombuffer(size_list, dtype=np.uint64)
    assigned = np.frombuffer(assigned_list, dtype=np.uint8)
    if not sizes.any():
        raise ConfigError("data.corpus: no text found; every document is empty")

    in_validation = np.isin(fingerprints, fingerprints[assigned == _VALIDATION])
    duplicates = (assigned == _TRAIN) & in_validation
    assigned[duplicates] = _LEFT_OUT
    notes: list[str] = []
    cut = None
    empty = [split for index, split in enumerate(_SPLITS) if not (assigned == index).any()]
    if empty and has_given_splits:
        raise ConfigError(
            f"data.corpus: the {empty[0]} split has no text that the other one lacks; name other text for it"
        )
    if empty:
        _, first_of_content = np.unique(fingerprints, return_index=True)
        assigned[:] = _LEFT_OUT
        assigned[first_of_content] = _TRAIN
        assigned[sizes == 0] = _LEFT_OUT
        is_used = assigned == _TRAIN
        cut = int(sizes[is_used].sum()) * (100 - validation_percent) // 100
        notes.append(
            f"too few documents to split ({is_used.sum()}): validation is the last "
            f"{validation_percent}% of the text"
        )
    elif num_duplicates := int(duplicates.sum()):
        documents_text = "1 document" if num_duplicates == 1 else f"{num_duplicates} documents"
        notes.append(f"{documents_text} left out of training: validation holds the same content")
    return SplitPlan(
        documents=Documents(
            corpus_sha256=corpus.hexdigest(),
            count=len(assigned),
            digests=tuple(digests) if len(assigned) <= MAX_NAMED else None,
        ),
        num_bytes=int(sizes.sum()),
        notes=tuple(notes),
        assigned=assigned,
        fingerprints=fingerprints,
        cut=cut,
    )


def split_pieces(documents: Iterable[Document], plan: SplitPlan) -> Iterator[Piece]:
    """Yield the text of a corpus in order, in pieces of one split; ConfigError if it has changed."""
    position, index = 0, -1
    for index, document in enumerate(documents):
        if index == len(plan.assigned):
            raise _changed_meanwhile(document.name)
        assigned = plan.assigned[index]
        content = hashlib.sha256()
        split = _SPLITS[0] if assigned == _LEFT_OUT else _SPLITS[assigned]
        for block in document.blocks:
            content.update(block)
            if assigned == _LEFT_OUT:
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
        if assigned != _LEFT_OUT:
            yield Piece(split, b"")
    if index + 1 != len(plan.assigned):
        raise _changed_meanwhile("the last document")


def _bytes_before(block: bytes, cut: int) -> int:
    """Return the number of bytes of `block` before the cut, whose position counts from the block's start."""
    if cut >= len(block):
        return len(block)
    return text_boundary(block, cut, reach=_REACH_BYTES) if cut > 0 else 0


def _fingerprint(content: hashlib._Hash) -> int:
    return int.from_bytes(content.digest()[:8])


def _changed_meanwhile(name: str) -> ConfigError:
    return ConfigError(f"data.corpus: '{name}' changed while it was being read; start again")
