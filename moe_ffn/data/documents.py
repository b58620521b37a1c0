"""Which documents a run was trained on, so that a changed corpus is noticed and the change named."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from moe_ffn.errors import ConfigError

MAX_NAMED = 10_000
"""A megabyte of names and digests; of a corpus of more documents only their number and digest is kept."""


@dataclass(frozen=True)
class Documents:
    """What a corpus held when it was read."""

    corpus_sha256: str
    """Digest of every name, content and given split."""

    count: int

    digests: tuple[tuple[str, str], ...] | None
    """Name and sha256 of each document in order; None where there are more than 10,000."""

    def to_dict(self) -> dict[str, Any]:
        """Plain values, fit for JSON, from which `from_dict` makes an equal one."""
        digests = None if self.digests is None else [list(pair) for pair in self.digests]
        return {"corpus_sha256": self.corpus_sha256, "count": self.count, "digests": digests}

    @classmethod
    def from_dict(cls, values: Any) -> Documents:
        """The documents whose `to_dict` gave `values`; ConfigError where nothing like it did."""
        try:
            digests = values["digests"]
            return cls(
                corpus_sha256=str(values["corpus_sha256"]),
                count=int(values["count"]),
                digests=None
                if digests is None
                else tuple((str(name), str(digest)) for name, digest in digests),
            )
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            raise ConfigError("the list of documents is damaged") from error


def changed(before: Documents, now: Documents) -> str | None:
    """What became of the documents since, in one sentence that names the first; None if nothing.

    `'b.txt' was removed, and 2 other documents differ too`
    """
    if before.corpus_sha256 == now.corpus_sha256:
        return None
    if before.digests is None or now.digests is None:
        how_many = (
            f"it has {now.count:,} documents and had {before.count:,}"
            if now.count != before.count
            else f"one of its {now.count:,} documents at least is not the same"
        )
        return f"the corpus changed: {how_many}"
    found = list(_differences(_by_name(before.digests), _by_name(now.digests)))
    if not found:
        return "the documents come in another order, or in other splits, than before"
    others = len(found) - 1
    if not others:
        return found[0]
    return (
        f"{found[0]}, and {others:,} other document{'s differ' if others > 1 else ' differs'} too"
    )


def _by_name(digests: Iterable[tuple[str, str]]) -> Mapping[str, list[str]]:
    """The contents under each name, which need not be unique."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, digest in digests:
        found[name].append(digest)
    return found


def _differences(before: Mapping[str, list[str]], now: Mapping[str, list[str]]) -> Iterable[str]:
    for name, digests in before.items():
        if name not in now:
            yield f"'{name}' was removed"
        elif now[name] != digests:
            yield f"'{name}' has changed"
    for name in now:
        if name not in before:
            yield f"'{name}' is new"
