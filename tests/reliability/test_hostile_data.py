"""All text comes back; what is no text, id, stored tokenizer or batch is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from moe_ffn.data.batches import TrainBatches, ValidationBatches
from moe_ffn.data.tokenizer import (
    BPEConfig,
    BytesConfig,
    BytesTokenizer,
    Tokenizer,
    TokenizerConfig,
    train_bpe,
)
from tests.helpers.refusing import refuses

# -------------------------------------------------------------------------------------- tokenizers


@cache
def tokenizer(kind: str) -> Tokenizer:
    return (
        BytesTokenizer() if kind == "bytes" else train_bpe([b"the cat sat on the mat " * 50], 300)
    )


every_tokenizer = pytest.mark.parametrize("kind", ["bytes", "bpe"])


@every_tokenizer
def test_every_byte_alone_and_next_to_every_other_comes_back(kind: str) -> None:
    one = tokenizer(kind)
    texts = [bytes([first, second]) for first in range(256) for second in (first, 0xC3, 0x20)]
    texts += [bytes(range(256)), b"", b"a" * 100_000, b"<|endoftext|>", b"\xff<|endoftext|>\x00"]
    for text, ids in zip(texts, one.encode_batch(texts), strict=True):
        assert b"".join(one.token_bytes[index] for index in ids) == text
        assert one.end_of_document not in ids
        assert ids.dtype == one.dtype


@pytest.mark.parametrize("text", [["abc"], None, 3, [1]], ids=str)
@every_tokenizer
def test_what_is_no_text_is_not_encoded(kind: str, text: Any) -> None:
    message = f"a tokenizer encodes str or bytes, but got {text}; encode one text at a time"
    refuses(lambda: tokenizer(kind).encode(text), message, TypeError)


BAD_IDS: list[tuple[Any, type[Exception], str]] = [
    ([-1], ValueError, "ids must lie in [0, "),
    ([3, 10**6], ValueError, "ids must lie in [0, "),
    ([1.0], TypeError, "ids must be whole numbers, got 1.0"),
    ("65", TypeError, "ids must be whole numbers, got '6'"),
    (torch.tensor([[65, 66]]), TypeError, "ids must be whole numbers, got [65, 66]"),
]


@pytest.mark.parametrize(("ids", "error", "message"), BAD_IDS, ids=lambda value: str(value)[:24])
@every_tokenizer
def test_what_is_no_id_is_not_decoded(
    kind: str, ids: Any, error: type[Exception], message: str
) -> None:
    refuses(lambda: tokenizer(kind).decode(ids), message, error)


def _set(*path: str, to: Any) -> Callable[[dict[str, Any]], None]:
    def change(stored: dict[str, Any]) -> None:
        for key in path[:-1]:
            stored = stored[key]
        stored[path[-1]] = to

    return change


STORED = "data.tokenizer: the stored tokenizer of type 'bpe' "
BAD_TOKENIZERS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "no_definition": (lambda stored: stored.pop("tokenizer"), "cannot be read: "),
    "null": (_set("tokenizer", to=None), "cannot be read: "),
    "text": (_set("tokenizer", to="x"), "cannot be read: "),
    "another_mapping": (_set("tokenizer", to={"a": 1}), "cannot be read: "),
    "merges_of_no_tokens": (
        _set("tokenizer", "model", "merges", to=[["z", "qq"]]),
        "cannot be read",
    ),
    "merges_of_numbers": (_set("tokenizer", "model", "merges", to=[1, 2]), "cannot be read: "),
    "empty_vocabulary": (_set("tokenizer", "model", "vocab", to={}), "cannot be read: "),
    "another_model": (_set("tokenizer", "model", "type", to="WordPiece"), "cannot be read: "),
    "gap": (_set("tokenizer", "model", "vocab", "Ġthe", to=9999), "does not give each of its "),
    "one_id_twice": (_set("tokenizer", "model", "vocab", "a", to=5), "does not give each of its "),
    "foreign_token": (
        _set("tokenizer", "model", "vocab", "中", to=269),
        "has the token '中', which is not written as bytes",
    ),
    "lower_case": (_set("tokenizer", "normalizer", to={"type": "Lowercase"}), "loses text: "),
    "composed": (_set("tokenizer", "normalizer", to={"type": "NFC"}), "loses text: "),
    "spaces": (_set("tokenizer", "pre_tokenizer", to=None), "loses text: "),
    "prefix": (_set("tokenizer", "pre_tokenizer", "add_prefix_space", to=True), "loses text: "),
}


@pytest.mark.parametrize(("change", "message"), BAD_TOKENIZERS.values(), ids=BAD_TOKENIZERS)
def test_a_stored_tokenizer_of_junk_is_refused(
    change: Callable[[dict[str, Any]], None], message: str
) -> None:
    stored = json.loads(json.dumps(tokenizer("bpe").to_dict()))
    change(stored)
    refuses(lambda: BPEConfig().restore(stored), STORED + message)


def test_a_stored_tokenizer_that_would_cut_text_does_not() -> None:
    stored = json.loads(json.dumps(tokenizer("bpe").to_dict()))
    stored["tokenizer"]["truncation"] = {
        "direction": "Right",
        "max_length": 64,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    text = b"The mat. " * 50
    one = BPEConfig().restore(stored)
    assert b"".join(one.token_bytes[index] for index in one.encode(text)) == text


@pytest.mark.parametrize("stored", [None, [], "bpe", 3], ids=str)
@pytest.mark.parametrize("config", [BytesConfig(), BPEConfig()])
def test_a_stored_tokenizer_is_a_mapping(config: TokenizerConfig, stored: Any) -> None:
    message = f"data.tokenizer: the stored tokenizer must be a mapping, but is {stored!r}"
    refuses(lambda: config.restore(stored), message)


# ----------------------------------------------------------------------------- batches by number

TOKENS = np.arange(100) % 50
BAD_TRAIN_BATCHES: list[tuple[dict[str, Any], str]] = [
    ({"batch_size": 0}, "data.batch_size must be at least 1, got 0"),
    ({"batch_size": -2}, "data.batch_size must be at least 1, got -2"),
    ({"batch_size": 4.0}, "data.batch_size must be a whole number, got 4.0"),
    ({"seq_len": 0}, "data.seq_len must be at least 1, got 0"),
    ({"seq_len": -1}, "data.seq_len must be at least 1, got -1"),
    ({"world_size": 0}, "world_size must be at least 1, got 0"),
    ({"world_size": -1}, "world_size must be at least 1, got -1"),
    (
        {"world_size": 8, "rank": 7},
        "data.batch_size (4) must be divisible by the number of ranks (8)",
    ),
    ({"world_size": 2, "rank": 2}, "rank (2) must lie in [0, world_size), and that is 2"),
    ({"rank": -1}, "rank (-1) must lie in [0, world_size), and that is 1"),
    (
        {"tokens": TOKENS.reshape(10, 10)},
        "tokens must be whole numbers in one row, but are int64 of ",
    ),
    ({"tokens": TOKENS + 0.5}, "tokens must be whole numbers in one row, but are float64 of "),
    ({"tokens": TOKENS[:0]}, "data.seq_len (4) must be shorter than the train split (0 tokens)"),
]


@pytest.mark.parametrize(
    ("options", "message"), BAD_TRAIN_BATCHES, ids=[text for _, text in BAD_TRAIN_BATCHES]
)
def test_what_gives_no_batches_is_refused(options: dict[str, Any], message: str) -> None:
    arguments = {"tokens": TOKENS, "seq_len": 4, "batch_size": 4, "seed": 0, **options}
    refuses(lambda: TrainBatches(**arguments), message)
    if options.keys() & {"world_size", "rank"} or not len(arguments["tokens"]):
        return
    del arguments["seed"]
    refuses(lambda: ValidationBatches(**arguments, num_tokens=20), message)


def test_a_batch_of_any_number_is_of_the_tokens() -> None:
    batches = TrainBatches(TOKENS, seq_len=4, batch_size=1000, seed=2**80)
    for index in (0, 10**18):
        batch = batches[index]
        assert torch.equal(batch.target_ids, (batch.input_ids + 1) % 50)
