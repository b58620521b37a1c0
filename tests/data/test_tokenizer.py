"""What holds for every tokenizer, and numbers worked by hand for each."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moe_ffn.config.errors import ConfigError
from moe_ffn.data.tokenizer import (
    BPEConfig,
    BytesConfig,
    BytesTokenizer,
    Tokenizer,
    TokenizerConfig,
    train_bpe,
)

TEXT = b"the theme of the thesis\n    def there(self):  # <|endoftext|> caf\xc3\xa9\n" * 20
BPE = train_bpe([TEXT], vocab_size=512)

TOKENIZERS = pytest.mark.parametrize(
    "tokenizer", [BytesTokenizer(), BPE], ids=["bytes", "bpe"], scope="module"
)


@TOKENIZERS
@given(text=st.text())
def test_text_comes_back_exactly(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert torch.equal(ids, tokenizer.encode(text.encode()))


@TOKENIZERS
@given(content=st.binary())
def test_any_bytes_come_back_exactly(tokenizer: Tokenizer, content: bytes) -> None:
    ids = tokenizer.encode(content)
    assert b"".join(tokenizer.token_bytes[index] for index in ids) == content
    assert tokenizer.decode(ids) == content.decode("utf-8", errors="replace")
    assert tokenizer.byte_lengths[ids].sum() == len(content)


@TOKENIZERS
def test_the_end_of_document_is_no_text(tokenizer: Tokenizer) -> None:
    assert tokenizer.byte_lengths[tokenizer.end_of_document] == 0
    assert tokenizer.decode([tokenizer.end_of_document]) == ""
    assert tokenizer.end_of_document not in tokenizer.encode(b"<|endoftext|>")


@TOKENIZERS
def test_ids_are_below_the_vocabulary_int64_for_a_model_and_small_for_a_file(
    tokenizer: Tokenizer,
) -> None:
    text = bytes(range(256))
    ids, (stored,) = tokenizer.encode(text), tokenizer.encode_batch([text])
    assert ids.dtype == torch.int64
    assert stored.dtype == tokenizer.dtype == np.uint16
    assert ids.tolist() == stored.tolist()
    assert ids.ndim == 1
    assert nn.Embedding(tokenizer.vocab_size, 2)(ids).shape == (len(ids), 2)
    assert tokenizer.encode("").tolist() == []
    assert ids.max() < tokenizer.vocab_size == len(tokenizer.byte_lengths)
    assert tokenizer.byte_lengths.dtype == np.int64


@TOKENIZERS
def test_a_batch_encodes_as_its_texts_do(tokenizer: Tokenizer) -> None:
    texts = [b"the theme", b"", b"\xff caf\xc3\xa9 \xfe", b"thesis"]
    for ids, text in zip(tokenizer.encode_batch(texts), texts, strict=True):
        np.testing.assert_array_equal(ids, tokenizer.encode(text))


@pytest.mark.parametrize(
    ("config", "tokenizer"),
    [(BytesConfig(), BytesTokenizer()), (BPEConfig(), BPE)],
    ids=["bytes", "bpe"],
)
def test_a_tokenizer_is_restored_from_json(config: TokenizerConfig, tokenizer: Tokenizer) -> None:
    restored = config.restore(json.loads(json.dumps(tokenizer.to_dict())))
    assert restored.token_bytes == tokenizer.token_bytes
    assert restored.end_of_document == tokenizer.end_of_document
    np.testing.assert_array_equal(restored.encode(TEXT), tokenizer.encode(TEXT))


def test_restoring_as_another_kind_is_refused() -> None:
    message = r"data\.tokenizer\.type: 'bpe', but the stored tokenizer is 'bytes'; use the config"
    with pytest.raises(ConfigError, match=message):
        BPEConfig().restore(BytesTokenizer().to_dict())


@pytest.mark.parametrize(("vocab_size", "dtype"), [(65_536, np.uint16), (65_537, np.uint32)])
def test_ids_are_as_wide_as_the_vocabulary_needs(
    vocab_size: int, dtype: type[np.unsignedinteger]
) -> None:
    tokenizer = BytesTokenizer()
    Tokenizer.__init__(tokenizer, [b"x"] * vocab_size, end_of_document=0)
    assert tokenizer.dtype == dtype


def test_ids_of_bytes_are_the_bytes() -> None:
    tokenizer = BytesTokenizer()
    assert tokenizer.encode("aé".encode()).tolist() == [97, 195, 169]
    assert (tokenizer.vocab_size, tokenizer.end_of_document) == (257, 256)


class TestBPE:
    def test_learns_what_is_frequent(self) -> None:
        assert b" the" in BPE.token_bytes
        assert len(BPE.encode(TEXT)) < len(TEXT) / 3

    def test_a_short_text_yields_a_smaller_vocabulary(self) -> None:
        # "abab" twice as a word: the end, 256 bytes, and the merges "ab" and "abab".
        tokenizer = train_bpe([b"abab\nabab"], vocab_size=512)
        assert tokenizer.vocab_size == 259
        assert tokenizer.token_bytes[-2:] == (b"ab", b"abab")
        assert len(tokenizer.encode(b"abab")) == 1

    def test_training_is_deterministic_and_survives_invalid_bytes(self) -> None:
        text = [TEXT, b"\xff\xfe" + TEXT]
        assert train_bpe(text, 512).to_dict() == train_bpe(text, 512).to_dict()

    def test_without_tokenizers_the_message_says_what_to_install(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        message = r"data\.tokenizer\.type: 'bpe' needs .*: pip install tokenizers$"
        with pytest.raises(ConfigError, match=message):
            BPEConfig().build([TEXT])
