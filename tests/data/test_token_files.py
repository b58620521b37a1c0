"""Files of tokens as one row: what is read, what they are known by, and what is no such file."""

from __future__ import annotations

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from moe_ffn.config.errors import ConfigError
from moe_ffn.data.batches import TrainBatches
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.data.split import changed
from moe_ffn.data.token_files import TokenSequence
from moe_ffn.data.tokenizer import (
    BPEConfig,
    BytesConfig,
    BytesTokenizer,
    Tokenizer,
    TokenizerConfig,
    train_bpe,
)

IDS = np.random.default_rng(0).integers(0, 257, 1000).astype(np.uint16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A thousand ids in three files, one of them a NumPy array, next to other files."""
    folder = tmp_path / "tokens"
    folder.mkdir()
    IDS[:300].tofile(folder / "a.bin")
    np.save(folder / "b.npy", IDS[300:301].astype(np.int32))
    IDS[301:].tofile(folder / "c.bin")
    (folder / "README.md").write_text("not tokens")
    return folder


def config_of(folder: Path, **changes: Any) -> DataConfig:
    corpus = {"type": "tokens", "train": str(folder), **changes.pop("corpus", {})}
    return DataConfig.model_validate({"corpus": corpus, "seq_len": 8, **changes})


def row_of(folder: Path) -> TokenSequence:
    paths = sorted(path for path in folder.iterdir() if path.suffix != ".md")
    return TokenSequence.of(paths, np.dtype(np.uint16))


@given(start=st.integers(-5, 1005), stop=st.integers(-5, 1005), step=st.integers(1, 3))
def test_a_slice_of_the_row_is_that_of_the_files_joined(
    tmp_path_factory: pytest.TempPathFactory, start: int, stop: int, step: int
) -> None:
    folder = tmp_path_factory.mktemp("tokens", numbered=True)
    for name, ids in (("a", IDS[:300]), ("b", IDS[300:301]), ("c", IDS[301:])):
        ids.tofile(folder / f"{name}.bin")
    row = row_of(folder)
    assert row[start:stop:step].tolist() == IDS[start:stop:step].tolist()
    assert row.part(100, 900)[start:stop].tolist() == IDS[100:900][start:stop].tolist()


def test_a_slice_opens_only_the_files_it_needs(folder: Path) -> None:
    row = row_of(folder)
    assert row.dtype == row[299:302].dtype == np.int32, "which holds those of both types"
    (folder / "a.bin").unlink()
    (folder / "c.bin").unlink()
    assert row[300:301].tolist() == IDS[300:301].tolist(), "all of the file in the middle"
    assert row[301:301].tolist() == []
    for start, stop in ((299, 301), (300, 302)):
        with pytest.raises(ConfigError, match=r"' cannot be read \(No such file or directory\)$"):
            row[start:stop]


def test_the_end_of_the_row_or_files_of_their_own_are_validated_on(folder: Path) -> None:
    data = prepare(config_of(folder, validation_percent=10))
    assert np.array_equal(data.train[:], IDS[:900])
    assert np.array_equal(data.validation[:], IDS[900:])
    corpus = {"train": [f"{folder}/a.bin", f"{folder}/b.npy"], "validation": f"{folder}/c.bin"}
    data = prepare(config_of(folder, corpus=corpus))
    assert (len(data.train), len(data.validation)) == (301, 699)


def test_files_are_known_by_blocks_of_them(folder: Path) -> None:
    config = config_of(folder)
    before = prepare(config)
    assert changed(before.documents, prepare(config).documents) is None
    IDS[1:301].tofile(folder / "a.bin")
    after = prepare(config)
    assert after.corpus_sha256 != before.corpus_sha256
    assert changed(before.documents, after.documents) == "'a.bin' has changed"


def digest_of(folder: Path, **changes: Any) -> str:
    return prepare(config_of(folder, **changes)).corpus_sha256


def test_a_large_file_is_known_by_its_size_type_and_ends(tmp_path: Path) -> None:
    """A hundred thousand tokens are more than 16 blocks of 4096."""

    def digest(*, size: int = 100_000, dtype: str = "uint16", one_at: int = 0) -> str:
        ids = np.zeros(size, dtype)
        ids[one_at] = 1
        np.save(tmp_path / "a.npy", ids)
        return digest_of(tmp_path / "a.npy", validation_percent=50)

    changes = [{"size": 100_002}, {"dtype": "int16"}, {"one_at": 50_000}, {"one_at": -1}]
    assert len({digest(), *(digest(**change) for change in changes)}) == 5


def test_validation_files_and_the_cut_are_part_of_what_a_corpus_is(folder: Path) -> None:
    corpus = {"train": f"{folder}/a.bin", "validation": f"{folder}/c.bin"}
    found = {
        digest_of(folder),
        digest_of(folder, validation_percent=50),
        digest_of(folder, corpus=corpus),
    }
    IDS[300:].tofile(folder / "c.bin")
    found.add(digest_of(folder, corpus=corpus))
    assert len(found) == 4


def test_ids_of_a_given_type_are_read_from_a_file_of_any_name(tmp_path: Path) -> None:
    path = tmp_path / "tokens.dat"
    IDS.astype(np.uint32).tofile(path)
    data = prepare(config_of(path, corpus={"dtype": "uint32"}))
    assert np.array_equal(data.train[:], IDS[:950])


def test_ids_of_64_bits_without_a_sign_stay_integers(folder: Path) -> None:
    np.save(folder / "b.npy", IDS[300:301].astype(np.uint64))
    row = row_of(folder)
    assert row.dtype == row[299:302].dtype == np.int64, "float64 would hold those of both types"
    assert row[299:302].tolist() == IDS[299:302].tolist()


def test_a_tokenizer_of_another_program_or_run_is_read(tmp_path: Path) -> None:
    bpe = train_bpe([b"the theme of the thesis " * 20], vocab_size=512)
    stored = bpe.to_dict()
    for name, values in (("hf.json", stored["tokenizer"]), ("run.json", stored)):
        (tmp_path / name).write_text(json.dumps(values))
        config = DataConfig.model_validate(
            {"tokenizer": {"type": "file", "path": str(tmp_path / name)}}
        ).tokenizer
        assert config.build(()).token_bytes == bpe.token_bytes
        assert config.max_vocab_size == bpe.vocab_size
        assert config.restore(stored).token_bytes == bpe.token_bytes


def unsupported(config: DataConfig) -> str:
    with pytest.raises(ConfigError) as raised:
        prepare(config)
    return str(raised.value)


@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("split", ["train", "validation"])
def test_ids_beyond_the_vocabulary_are_rejected(folder: Path, split: str, place: int) -> None:
    ids = np.zeros(9_000, np.uint16)
    ids[place] = 300
    ids.tofile(folder / "b.bin")
    corpus = {"train": f"{folder}/a.bin", split: f"{folder}/b.bin"}
    assert unsupported(config_of(folder, corpus=corpus)) == (
        f"data.corpus: '{folder / 'b.bin'}' holds the token 300, but data.tokenizer has a vocabulary of 257; "
        "give the tokenizer that made the file: data.tokenizer {type: file, path: tokenizer.json}"
    )


def test_negative_ids_are_rejected(folder: Path) -> None:
    np.save(folder / "b.npy", np.array([3, -100]))
    assert unsupported(config_of(folder)) == (
        f"data.corpus: '{folder / 'b.npy'}' holds the token -100; leave out padding, since ids begin at 0"
    )


def test_files_that_are_not_one_row_of_ids_are_rejected(folder: Path) -> None:
    (folder / "a.bin").write_bytes(b"123")
    assert unsupported(config_of(folder)) == (
        f"data.corpus: '{folder / 'a.bin'}' has 3 bytes, which is not a whole number of uint16 ids (2 bytes "
        "each); give data.corpus.dtype"
    )
    np.save(folder / "a.npy", np.zeros((2, 2)))
    assert unsupported(config_of(folder / "a.npy")) == (
        f"data.corpus: '{folder / 'a.npy'}' must be a one-dimensional array of integers, but is float64 of "
        "shape (2, 2); save the token ids in one row"
    )
    (folder / "a.npy").write_bytes(b"no array")
    assert unsupported(config_of(folder / "a.npy")).startswith(
        f"data.corpus: '{folder / 'a.npy'}' is not a NumPy array ("
    )
    (folder / "none").mkdir()
    assert unsupported(config_of(folder / "none")) == (
        f"data.corpus.train: '{folder / 'none'}' has no token file (.bin or .npy); name one"
    )
    assert unsupported(config_of(folder / "x")).startswith(
        f"data.corpus.train: '{folder / 'x'}' does not exist"
    )


def test_a_missing_tokenizer_is_rejected(folder: Path) -> None:
    config = config_of(folder, tokenizer={"type": "file", "path": "nowhere.json"})
    assert unsupported(config) == (
        "data.tokenizer.path: 'nowhere.json' does not exist, or is not a tokenizer.json"
    )


def test_ten_billion_tokens_open_at_once_in_little_memory(tmp_path: Path) -> None:
    """Ten sparse files of a billion tokens each, all 0."""
    for number in range(10):
        with (tmp_path / f"{number}.bin").open("wb") as file:
            file.truncate(2_000_000_000)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    data = prepare(config_of(tmp_path, seq_len=255))
    train = TrainBatches(data.train, seq_len=255, batch_size=64, seed=0)
    last = train.windows_per_epoch // 64
    for index in (0, 1, last, last + 1):  # the last one ends an epoch and begins another
        assert train[index].input_ids.shape == (64, 255)
    seconds = time.perf_counter() - started
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert train.windows_per_epoch == 37_109_374
    assert seconds < 5
    assert grown < 100 << 10  # kilobytes; a list of the windows takes 300 MB


# -- what holds for every tokenizer, and numbers worked by hand for each


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


def test_restoring_as_another_kind_is_rejected() -> None:
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
    def test_learns_frequent_sequences(self) -> None:
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

    def test_missing_tokenizers_is_reported_with_the_install_command(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setitem(sys.modules, "tokenizers", None)
        message = r"data\.tokenizer\.type: 'bpe' needs .*: pip install tokenizers$"
        with pytest.raises(ConfigError, match=message):
            BPEConfig().build([TEXT])
