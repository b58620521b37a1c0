from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from moe_ffn.config.errors import ConfigError
from moe_ffn.data import batches
from moe_ffn.data import split as split_module
from moe_ffn.data.batches import (
    Batch,
    FeistelOrder,
    TrainBatches,
    ValidationBatches,
    epoch_starts,
    spread_starts,
    windows_per_epoch,
)
from moe_ffn.data.corpus import Document, Split
from moe_ffn.data.split import Documents, changed, plan_split, split_pieces

TOKENS = np.arange(1000, dtype=np.uint16)


def rows(batch: Batch) -> list[int]:
    """The first token of each sequence, which in TOKENS is also where it lies."""
    return batch.input_ids[:, 0].tolist()


def windows_of(batches: Iterable[Batch]) -> list[list[int]]:
    return [
        [*inputs, targets[-1]]
        for batch in batches
        for inputs, targets in zip(batch.input_ids.tolist(), batch.target_ids.tolist(), strict=True)
    ]


def train(**changes: int) -> TrainBatches:
    return TrainBatches(TOKENS, **{"seq_len": 9, "batch_size": 4, "seed": 0, **changes})


def assert_equal(one: Batch, other: Batch) -> None:
    assert torch.equal(one.input_ids, other.input_ids)
    assert torch.equal(one.target_ids, other.target_ids)


class TestTrain:
    def test_targets_are_the_inputs_shifted_by_one(self) -> None:
        batch = train()[0]
        assert batch.input_ids.shape == batch.target_ids.shape == (4, 9)
        assert batch.input_ids.dtype == batch.target_ids.dtype == torch.int64
        assert batch.input_ids.is_contiguous()
        assert batch.target_ids.is_contiguous()
        assert torch.equal(batch.target_ids, batch.input_ids + 1)

    def test_depends_only_on_seed_and_index(self) -> None:
        in_order = [train()[index] for index in range(60)]
        batches = train()
        for index in (59, 3, 30, 0, 58):
            assert_equal(batches[index], in_order[index])

    def test_each_window_comes_once_per_epoch_across_batch_borders(self) -> None:
        batches = train(batch_size=7)
        count = batches.windows_per_epoch
        assert count == 99
        assert count % 7 != 0
        visited = [start for batch in map(batches.__getitem__, range(50)) for start in rows(batch)]
        epochs = [visited[epoch * count : (epoch + 1) * count] for epoch in range(3)]
        for starts in map(sorted, epochs):
            assert starts == list(range(starts[0], starts[0] + 10 * count, 10))
        assert len({tuple(start // 10 for start in starts) for starts in epochs}) == 3, "one order"

    def test_windows_read_returns_each_window_once_in_order(self) -> None:
        batches = train(batch_size=7)
        in_order = windows_of(map(batches.__getitem__, range(50)))
        assert batches.windows_read(3, max_tokens=1000).tolist() == in_order[:21]
        assert batches.windows_read(50, max_tokens=1000).tolist() == in_order[:99], "an epoch"
        assert batches.windows_read(3, max_tokens=59).tolist() == in_order[:5], "5 of 10 tokens"
        assert batches.windows_read(0, max_tokens=1000).shape == (0, 10)
        of_rank = train(batch_size=7 * 2, rank=1, world_size=2).windows_read(2, max_tokens=1000)
        assert len(of_rank) == 28, "of all ranks"

    def test_a_batch_may_be_larger_than_an_epoch(self) -> None:
        batch = TrainBatches(TOKENS[:30], seq_len=9, batch_size=8, seed=0)[3]
        assert batch.input_ids.shape == (8, 9)

    @pytest.mark.parametrize("world_size", [2, 4])
    def test_ranks_together_see_the_batch_of_one(self, world_size: int) -> None:
        for index in (0, 24, 25, 1000):
            parts = [train(rank=rank, world_size=world_size)[index] for rank in range(world_size)]
            together = Batch(
                torch.cat([part.input_ids for part in parts]),
                torch.cat([part.target_ids for part in parts]),
            )
            assert_equal(together, train()[index])

    def test_the_batch_size_must_divide_by_the_ranks(self) -> None:
        message = (
            r"data\.batch_size \(4\) must be divisible by the number of ranks \(3\): "
            "it counts the sequences of all ranks together"
        )
        with pytest.raises(ConfigError, match=message):
            train(world_size=3)


class TestValidation:
    def test_windows_are_evenly_spaced_with_a_smaller_last_batch(self) -> None:
        batches = ValidationBatches(TOKENS, seq_len=9, batch_size=4, num_tokens=90)
        assert len(batches) == 3
        assert [rows(batch) for batch in batches] == [
            [0, 100, 200, 300],
            [400, 500, 600, 700],
            [800, 900],
        ]

    def test_there_is_at_most_the_split_and_at_least_one_sequence(self) -> None:
        everything = ValidationBatches(TOKENS, seq_len=9, batch_size=1, num_tokens=10**9)
        assert len(everything) == 100
        assert len(ValidationBatches(TOKENS, seq_len=9, batch_size=1, num_tokens=1)) == 1

    def test_windows_are_those_of_the_batches(self) -> None:
        batches = ValidationBatches(TOKENS, seq_len=9, batch_size=4, num_tokens=90)
        assert batches.windows.tolist() == windows_of(batches)

    def test_the_digest_is_of_every_token_and_of_where_windows_end(self) -> None:
        def digest(changed: int = 0, seq_len: int = 3, num_tokens: int = 12) -> str:
            ids = np.arange(1, 17, dtype=np.uint32)
            ids[-1] += changed
            batches = ValidationBatches(ids, seq_len, batch_size=1, num_tokens=num_tokens)
            assert batches.windows[-1, -1] == 16 + changed
            return batches.sha256

        # 16 tokens in 4 windows or in 2; the last one as it is, and as others of its low bytes.
        others = [digest(1), digest(1 << 16), digest(1 << 24), digest(seq_len=7, num_tokens=14)]
        assert len({digest(), *others}) == 5


SIZES = {"num_tokens": st.integers(9, 200), "seq_len": st.integers(1, 8)}


@pytest.fixture(params=["listed", "computed"])
def _order(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The order of few windows, and of so many that they are not kept in memory."""
    if request.param == "computed":
        monkeypatch.setattr(batches, "MAX_LISTED", 0)
    epoch_starts.cache_clear()
    yield
    epoch_starts.cache_clear()


@pytest.mark.usefixtures("_order")
@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(**SIZES, seed=st.integers(0, 2**63), epoch=st.integers(0, 1000))
def test_the_windows_of_an_epoch_are_adjacent(
    num_tokens: int, seq_len: int, seed: int, epoch: int
) -> None:
    starts = np.sort(epoch_starts(num_tokens, seq_len, seed, epoch)[:])
    assert len(starts) == windows_per_epoch(num_tokens, seq_len)
    assert starts[0] >= 0
    assert starts[-1] + seq_len + 1 <= num_tokens
    assert (np.diff(starts) == seq_len + 1).all()
    # As many as can begin at each of the window's places: seq_len + 1 offsets, and no room for one more.
    room = num_tokens - len(starts) * (seq_len + 1)
    assert room >= seq_len or len(starts) == 1
    assert room < seq_len + (seq_len + 1)


@pytest.mark.usefixtures("_order")
def test_order_and_offset_differ_between_epochs_and_seeds() -> None:
    first = epoch_starts(10_000, 9, 0, 0)[:]
    second, of_another_seed = epoch_starts(10_000, 9, 0, 1)[:], epoch_starts(10_000, 9, 1, 0)[:]
    for one, other in ((first, second), (first, of_another_seed), (second, of_another_seed)):
        assert not np.array_equal(one, other)
        assert not np.array_equal(one - one.min(), other - other.min()), "the same order"
    assert len({epoch_starts(10_000, 9, 0, epoch)[:].min() for epoch in range(30)}) > 5


@pytest.mark.parametrize("count", [1, 2, 3, 1000, 65_536, 65_537])
def test_any_part_of_a_computed_order_is_that_of_the_whole(count: int) -> None:
    order = FeistelOrder.drawn(count, np.random.default_rng(count))
    whole = order[:]
    assert np.array_equal(np.sort(whole), np.arange(count))
    for first in range(0, count, max(count // 3, 1)):
        assert np.array_equal(order[first : first + 7], whole[first : first + 7])


def test_a_computed_order_is_as_random_as_a_drawn_one() -> None:
    """Neighbours are as far apart, and places and numbers as unrelated; five deviations at most."""
    count = 100_000
    for seed in range(4):
        order = FeistelOrder.drawn(count, np.random.default_rng(seed))[:]
        gaps = np.abs(np.diff(order)) / count
        assert abs(gaps.mean() - 1 / 3) < 5 * np.sqrt(1 / 18 / count)
        assert abs(np.corrcoef(order, np.arange(count))[0, 1]) < 5 / np.sqrt(count)
        assert abs((order[:-1] % 2 == order[1:] % 2).mean() - 0.5) < 5 * 0.5 / np.sqrt(count)


@given(**SIZES, count=st.integers(1, 50))
def test_spread_windows_do_not_overlap(num_tokens: int, seq_len: int, count: int) -> None:
    starts = spread_starts(num_tokens, seq_len, count)
    assert 1 <= len(starts) <= count
    assert (np.diff(starts) >= seq_len + 1).all()
    assert starts[-1] + seq_len + 1 <= num_tokens


def test_spread_windows_are_even() -> None:
    assert spread_starts(100, 9, 4).tolist() == [0, 25, 50, 75]
    assert spread_starts(100, 24, 99).tolist() == [0, 25, 50, 75]
    # 107 / 4 is 26.75: the tokens that no whole window holds are spread between the windows too.
    assert spread_starts(107, 9, 4).tolist() == [0, 26, 53, 80]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_a_split_too_short_for_one_window_is_rejected(split: str) -> None:
    given = (
        {"batch_size": 4, "seed": 0} if split == "train" else {"batch_size": 4, "num_tokens": 90}
    )
    batches_of = TrainBatches if split == "train" else ValidationBatches
    batches_of(TOKENS[:9], seq_len=8, **given)
    message = rf"data\.seq_len \(9\) must be shorter than the {split} split \(9 tokens\): lower data\.seq_len"
    with pytest.raises(ConfigError, match=message):
        batches_of(TOKENS[:9], seq_len=9, **given)


# -- documents of the train and the validation split


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
    percent = drawn(names[0]) + 1  # validation is only the first of them
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


@pytest.mark.parametrize(
    ("train", "validation", "named"), [(b"x", b"x", "train"), (b"x", b"", "validation")]
)
def test_a_given_split_without_text_is_rejected(
    train: bytes, validation: bytes, named: str
) -> None:
    corpus = [Document("a", [train], "train"), Document("b", [validation], "validation")]
    message = rf"data\.corpus: the {named} split has no text that the other one lacks; name other"
    with pytest.raises(ConfigError, match=message):
        plan_split(corpus, 5)


@pytest.mark.parametrize("texts", [[], [("a", "")]], ids=["no document", "empty document"])
def test_no_text_at_all_is_rejected(texts: list[tuple[str, str]]) -> None:
    with pytest.raises(ConfigError, match=r"data\.corpus: no text found; every document"):
        plan_split(documents(texts), 5)


@pytest.mark.parametrize(
    "later",
    [[("a", "x")], [("a", "x"), ("b", "Y")], [("a", "x"), ("b", "y"), ("c", "z")]],
    ids=["fewer", "other", "more"],
)
def test_a_corpus_that_changes_meanwhile_is_rejected(later: list[tuple[str, str]]) -> None:
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
def test_a_damaged_list_is_rejected(values: Any) -> None:
    with pytest.raises(ConfigError, match=r"^the list of documents is damaged$"):
        Documents.from_dict(values)
