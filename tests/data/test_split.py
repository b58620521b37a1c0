from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.data import split as split_module
from moe_ffn.data.corpus import Document, Split
from moe_ffn.data.split import Documents, changed, plan_split, split_pieces

Texts = Iterable[tuple[str, str]]


def documents(texts: Texts, split: Split | None = None) -> Iterable[Document]:
    return (Document(name, [text.encode()] if text else [], split) for name, text in texts)


def split_of(texts: list[tuple[str, str]], percent: int) -> tuple[str, str]:
    """The training and the validation text, each document closed by a bar."""
    plan = plan_split(documents(texts), percent)
    sides = {"train": "", "validation": ""}
    for piece in split_pieces(documents(texts), plan):
        sides[piece.split] += "|" if piece.ends_document else piece.text.decode()
    return sides["train"], sides["validation"]


def drawn(name: str) -> int:
    return int(hashlib.sha256(name.encode()).hexdigest(), 16) % 100


def test_documents_are_split_by_the_digest_of_their_name() -> None:
    names = [f"{index}.txt" for index in range(200)]
    train, validation = split_of([(name, name) for name in names], 20)
    assert train == "".join(f"{name}|" for name in names if drawn(name) >= 20)
    assert validation == "".join(f"{name}|" for name in names if drawn(name) < 20)
    assert validation.count("|") == 36  # of the 40 to be expected


def test_no_content_is_on_both_sides() -> None:
    texts = [(f"{index}.txt", f"text {index % 50}") for index in range(200)]
    train, validation = (set(side.split("|")[:-1]) for side in split_of(texts, 20))
    assert train
    assert validation
    assert not train & validation
    assert train | validation == {text for _, text in texts}


def test_repeats_of_validation_are_noted_and_repeats_within_a_split_stay() -> None:
    names = sorted("abcdefgh", key=drawn)
    percent = drawn(names[0]) + 1  # validation is the first of them alone
    texts = [(name, "same" if name in (names[0], names[7]) else "other") for name in names]
    plan = plan_split(documents(texts), percent)
    assert plan.notes == ("1 document left out of training: validation holds the same content",)
    assert split_of(texts, percent) == ("other|" * 6, "same|")


def test_one_document_is_split_by_position_at_a_line() -> None:
    text = "".join(f"line {index}\n" for index in range(10))  # 70 bytes
    train, validation = split_of([("one.txt", text)], 25)
    # 75% is 52 bytes; the last line before that ends at 49.
    assert train == text[:49]
    assert validation == text[49:] + "|"


def test_a_few_documents_are_split_by_position_each_content_once() -> None:
    texts = [("a", "12345"), ("b", "12345"), ("c", ""), ("d", "67890")]
    assert split_of(texts, 1) == ("12345|6789", "0|")
    assert plan_split(documents(texts), 1).notes == (
        "too few documents to split (2): validation is the last 1% of the text",
    )


def test_a_document_longer_than_a_block_is_cut_once() -> None:
    blocks = [b"one\n", b"two\n", b"three\n", b"four\n"]  # 19 bytes, half is 9
    plan = plan_split([Document("a", blocks)], 50)
    pieces = list(split_pieces([Document("a", blocks)], plan))
    assert [(piece.split, piece.text) for piece in pieces] == [
        ("train", b"one\n"),
        ("train", b"two\n"),
        ("train", b"t"),
        ("validation", b"hree\n"),
        ("validation", b"four\n"),
        ("validation", b""),
    ]


def test_the_digest_is_that_of_names_contents_and_given_splits() -> None:
    def digest(*documents: Document) -> str:
        return plan_split(documents, 50).documents.corpus_sha256

    reference = digest(Document("a", [b"x", b"y"]), Document("b", [b"z"]))
    assert digest(Document("a", [b"xy"]), Document("b", [b"z"])) == reference
    others = {
        digest(Document("a", [b"x"]), Document("b", [b"yz"])),
        digest(Document("A", [b"xy"]), Document("b", [b"z"])),
        digest(Document("b", [b"z"]), Document("a", [b"xy"])),
        digest(Document("a", [b"xy"], "train"), Document("b", [b"z"], "validation")),
        digest(Document("a", [b"xy"], "validation"), Document("b", [b"z"], "train")),
    }
    assert len(others | {reference}) == 6


def test_given_splits_are_kept_and_training_loses_what_validation_holds() -> None:
    def corpus() -> list[Document]:
        train = documents([("0", "x"), ("1", "y"), ("2", "x")], "train")
        return [*train, *documents([("0", "x"), ("1", "z")], "validation")]

    pieces = list(split_pieces(corpus(), plan_split(corpus(), 5)))
    assert [piece.text for piece in pieces if piece.split == "train"] == [b"y", b""]
    assert [piece.text for piece in pieces if piece.split == "validation"] == [b"x", b"", b"z", b""]


def test_a_given_split_without_text_is_refused() -> None:
    corpus = [Document("a", [b"x"], "train"), Document("b", [b"x"], "validation")]
    message = r"data\.corpus: every text of the train split is in the other split too"
    with pytest.raises(ConfigError, match=message):
        plan_split(corpus, 5)


@pytest.mark.parametrize("texts", [[], [("a", "")]], ids=["no document", "empty document"])
def test_no_text_at_all_is_refused(texts: list[tuple[str, str]]) -> None:
    with pytest.raises(ConfigError, match=r"data\.corpus: no text found; every document"):
        plan_split(documents(texts), 5)


@pytest.mark.parametrize(
    "later",
    [[("a", "x")], [("a", "x"), ("b", "Y")], [("a", "x"), ("b", "y"), ("c", "z")]],
    ids=["fewer", "other", "more"],
)
def test_a_corpus_that_changes_meanwhile_is_refused(later: list[tuple[str, str]]) -> None:
    plan = plan_split(documents([("a", "x"), ("b", "y")]), 50)
    with pytest.raises(ConfigError, match=r"changed while it was being read; start again"):
        list(split_pieces(documents(later), plan))


def test_document_names_are_not_stored_beyond_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(split_module, "MAX_NAMED", 2)
    texts = [Document(str(number), [b"text %d\n" % number]) for number in range(3)]
    few = plan_split(texts[:2], 5).documents
    assert [name for name, _ in few.digests or ()] == ["0", "1"]
    many = plan_split(texts, 5).documents
    assert (many.count, many.digests) == (3, None)


def read(**contents: str) -> Documents:
    digests = tuple((name, f"sha256 of {content}") for name, content in contents.items())
    return Documents(f"sha256 of {list(contents.items())}", len(digests), digests)


BEFORE = read(a="one", b="two", c="three")


@pytest.mark.parametrize(
    ("now", "sentence"),
    [
        (BEFORE, None),
        (read(a="one", c="three"), "'b' was removed"),
        (read(a="one", b="other", c="three"), "'b' has changed"),
        (read(a="one", b="two", c="three", d="four"), "'d' is new"),
        (read(a="x", b="two"), "'a' has changed, and 1 other document differs too"),
        (read(d="four"), "'a' was removed, and 3 other documents differ too"),
        (read(c="three", a="one", b="two"),
         "the documents come in another order, or in other splits, than before"),
    ],
    ids=["equal", "removed", "changed", "new", "two", "all", "order"],
)  # fmt: skip
def test_a_change_is_named(now: Documents, sentence: str | None) -> None:
    assert changed(BEFORE, now) == sentence


def test_two_documents_of_one_name_are_distinguished() -> None:
    before, now = (Documents(f"x{y}", 2, (("a", "x"), ("a", y))) for y in "yz")
    assert changed(before, now) == "'a' has changed"


def test_without_document_names_only_their_number_is_compared() -> None:
    before, now = Documents("before", 3, None), Documents("now", 3, None)
    assert changed(before, now) == "the corpus changed: it has 3 documents, as many as before"
    fewer = read(a="1", b="2")
    assert changed(before, fewer) == "the corpus changed: it has 2 documents instead of 3"
    assert changed(fewer, before) == "the corpus changed: it has 3 documents instead of 2"


@pytest.mark.parametrize("value", [BEFORE, Documents("digest", 20_000, None)])
def test_json_gives_an_equal_one_back(value: Documents) -> None:
    assert Documents.from_dict(json.loads(json.dumps(value.to_dict()))) == value


@pytest.mark.parametrize(
    "values", [None, [], {}, {"corpus_sha256": "x", "count": 1, "digests": [1]}, {"digests": None}]
)
def test_a_damaged_list_is_refused(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"^the list of documents is damaged$"):
        Documents.from_dict(values)
