"""Files of tokens as one row: what is read, what they are known by, and what is no such file."""

from __future__ import annotations

import json
import resource
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_ffn.config.errors import ConfigError
from moe_ffn.data.batches import TrainBatches
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.data.split import changed
from moe_ffn.data.token_files import TokenSequence
from moe_ffn.data.tokenizer import train_bpe

IDS = np.random.default_rng(0).integers(0, 257, 1000).astype(np.uint16)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A thousand ids in three files, one of them an array of numpy, beside what is none."""
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


def test_a_slice_opens_the_files_that_it_lies_in_alone(folder: Path) -> None:
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
def test_ids_beyond_the_vocabulary_are_refused(folder: Path, split: str, place: int) -> None:
    ids = np.zeros(9_000, np.uint16)
    ids[place] = 300
    ids.tofile(folder / "b.bin")
    corpus = {"train": f"{folder}/a.bin", split: f"{folder}/b.bin"}
    assert unsupported(config_of(folder, corpus=corpus)) == (
        f"data.corpus: '{folder / 'b.bin'}' holds the token 300, but data.tokenizer has a vocabulary of 257; "
        "give the tokenizer that made the file: data.tokenizer {type: file, path: tokenizer.json}"
    )


def test_what_is_no_row_of_ids_is_refused(folder: Path) -> None:
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


def test_a_tokenizer_that_is_not_there_is_refused(folder: Path) -> None:
    config = config_of(folder, tokenizer={"type": "file", "path": "nowhere.json"})
    assert unsupported(config) == (
        "data.tokenizer.path: 'nowhere.json' does not exist, or is not a tokenizer.json"
    )


def test_ten_billion_tokens_are_begun_at_once_in_little_memory(tmp_path: Path) -> None:
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
