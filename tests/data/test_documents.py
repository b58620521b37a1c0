from __future__ import annotations

import json
from typing import Any

import pytest

from moe_ffn.data.split import Documents, changed
from moe_ffn.errors import ConfigError


def documents(**contents: str) -> Documents:
    digests = tuple((name, f"sha256 of {content}") for name, content in contents.items())
    return Documents(f"sha256 of {list(contents.items())}", len(digests), digests)


BEFORE = documents(a="one", b="two", c="three")


@pytest.mark.parametrize(
    ("now", "sentence"),
    [
        (BEFORE, None),
        (documents(a="one", c="three"), "'b' was removed"),
        (documents(a="one", b="other", c="three"), "'b' has changed"),
        (documents(a="one", b="two", c="three", d="four"), "'d' is new"),
        (documents(a="x", b="two"), "'a' has changed, and 1 other document differs too"),
        (documents(d="four"), "'a' was removed, and 3 other documents differ too"),
        (
            documents(c="three", a="one", b="two"),
            "the documents come in another order, or in other splits, than before",
        ),
    ],
    ids=["equal", "removed", "changed", "new", "two", "all", "order"],
)
def test_a_change_is_named(now: Documents, sentence: str | None) -> None:
    assert changed(BEFORE, now) == sentence


def test_two_documents_of_one_name_are_told_apart() -> None:
    def twice(first: str, second: str) -> Documents:
        return Documents(first + second, 2, (("a", first), ("a", second)))

    assert changed(twice("x", "y"), twice("x", "z")) == "'a' has changed"


def test_of_very_many_documents_only_the_number_is_known() -> None:
    before, now = Documents("before", 3, None), Documents("now", 3, None)
    assert changed(before, now) == "the corpus changed: it has 3 documents and had 3"
    fewer = documents(a="1", b="2")
    assert changed(before, fewer) == "the corpus changed: it has 2 documents and had 3"
    assert changed(fewer, before) == "the corpus changed: it has 3 documents and had 2"


@pytest.mark.parametrize("value", [BEFORE, Documents("digest", 20_000, None)])
def test_json_gives_an_equal_one_back(value: Documents) -> None:
    assert Documents.from_dict(json.loads(json.dumps(value.to_dict()))) == value


@pytest.mark.parametrize(
    "values", [None, [], {}, {"corpus_sha256": "x", "count": 1, "digests": [1]}, {"digests": None}]
)
def test_a_damaged_list_is_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"^the list of documents is damaged$"):
        Documents.from_dict(values)
