"""All text comes back; what is no text, id, stored tokenizer or batch is refused in one sentence."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from moe_ffn.data.batches import TrainBatches
from moe_ffn.data.tokenizer import (
    BPEConfig,
    BytesTokenizer,
    Tokenizer,
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


BAD_IDS: list[tuple[Any, type[Exception], str]] = [
    ([-1], ValueError, "ids must lie in [0, "),
    ([3, 10**6], ValueError, "ids must lie in [0, "),
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
    "merges_of_no_tokens": (
        _set("tokenizer", "model", "merges", to=[["z", "qq"]]),
        "cannot be read",
    ),
    "gap": (_set("tokenizer", "model", "vocab", "Ġthe", to=9999), "does not give each of its "),
    "foreign_token": (
        _set("tokenizer", "model", "vocab", "中", to=269),
        "has the token '中', which is not written as bytes",
    ),
    "lower_case": (_set("tokenizer", "normalizer", to={"type": "Lowercase"}), "loses text: "),
    "spaces": (_set("tokenizer", "pre_tokenizer", to=None), "loses text: "),
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


# ----------------------------------------------------------------------------- batches by number

TOKENS = np.arange(100) % 50


def test_a_batch_of_any_number_is_of_the_tokens() -> None:
    batches = TrainBatches(TOKENS, seq_len=4, batch_size=1000, seed=2**80)
    for index in (0, 10**18):
        batch = batches[index]
        assert torch.equal(batch.target_ids, (batch.input_ids + 1) % 50)
