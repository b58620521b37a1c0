from __future__ import annotations

import json
import os
import shutil
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.data import prepare as prepare_module
from moe_ffn.data.cache import read_meta
from moe_ffn.data.corpus import TextConfig
from moe_ffn.data.prepare import DataConfig, PreparedData, prepare
from moe_ffn.data.tokenizer import BPEConfig, BytesConfig

Prepare = Callable[..., PreparedData]


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index in range(40):
        lines = (f"{index}: line {line} of a text with an é in it\n" for line in range(20))
        (folder / f"{index}.txt").write_text("".join(lines))
    return folder


def config_of(path: Path, cache_dir: Path, **changes: object) -> DataConfig:
    values = {"seq_len": 8, "validation_percent": 20, "cache_dir": str(cache_dir), **changes}
    return DataConfig.model_validate({"corpus": {"type": "text", "paths": str(path)}, **values})


@pytest.fixture
def prepared(texts: Path, tmp_path: Path) -> Prepare:

    def run(**changes: object) -> PreparedData:
        return prepare(config_of(texts, tmp_path / "cache", **changes))

    return run


def documents(data: PreparedData, split: str) -> list[str]:
    tokens = getattr(data, split)
    ends = np.flatnonzero(tokens == data.tokenizer.end_of_document)
    return [data.tokenizer.decode(part) for part in np.split(tokens, ends + 1)[:-1]]


@pytest.mark.parametrize("tokenizer", ["bytes", {"type": "bpe", "vocab_size": 512}], ids=str)
def test_every_document_is_in_one_split_and_comes_back_exactly(
    prepared: Prepare, texts: Path, tokenizer: Any
) -> None:
    data = prepared(tokenizer=tokenizer)
    train, validation = documents(data, "train"), documents(data, "validation")
    originals = {path.read_text() for path in texts.iterdir()}
    assert len(train) + len(validation) == 40
    assert validation
    assert {*train, *validation} == originals
    for split, size in (("train", data.train_size), ("validation", data.validation_size)):
        tokens = getattr(data, split)
        assert size.num_tokens == len(tokens)
        assert size.num_documents == len(documents(data, split))
        assert size.num_bytes == data.tokenizer.byte_lengths[tokens].sum()
    num_bytes = data.train_size.num_bytes + data.validation_size.num_bytes
    assert num_bytes == sum(len(text.encode()) for text in originals)


def test_the_bpe_has_seen_only_the_training_split(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[bytes] = []

    def build(self: BPEConfig, text: object) -> object:
        read.extend(text)  # pyright: ignore[reportArgumentType]
        return BytesConfig().build([])

    monkeypatch.setattr(BPEConfig, "build", build)
    monkeypatch.setattr(BPEConfig, "restore", lambda self, values: BytesConfig().build([]))
    data = prepared(tokenizer="bpe")
    assert b"".join(read).decode() == "".join(documents(data, "train"))


def test_a_tokenizer_is_trained_on_evenly_spaced_pieces_of_a_large_corpus(
    prepared: Prepare, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = prepared(tokenizer="bpe").tokenizer.vocab_size
    monkeypatch.setattr(prepare_module, "_TOKENIZER_TRAINING_BYTES", 2000)
    assert prepared(tokenizer="bpe", validation_percent=21).tokenizer.vocab_size < whole


def test_one_file_gives_both_parts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "moe_ffn")
    text = "".join(f"line {index}\n" for index in range(1000))
    (tmp_path / "one.txt").write_text(text)
    config = config_of(tmp_path / "one.txt", tmp_path / "cache", validation_percent=10)
    for _ in range(2):  # built, then found
        data = prepare(config)
        train, validation = (data.tokenizer.decode(s[:]) for s in (data.train, data.validation))
        assert train + validation == text
        assert train.endswith("\n")
        assert len(validation) == pytest.approx(len(text) / 10, abs=10)
        assert data.validation[-1:] == data.tokenizer.end_of_document
        assert (data.train_size.num_documents, data.validation_size.num_documents) == (1, 1)
        note = "too few documents to split (1): validation is the last 10% of the text"
        assert data.notes == (note,)
        assert caplog.messages[-1] == f"data: {note}"


class TestCache:
    def test_is_found_again(self, prepared: Prepare) -> None:
        first = prepared()
        times = {path.name: path.stat().st_mtime_ns for path in first.folder.iterdir()}
        assert set(times) == {"train.bin", "validation.bin", "tokenizer.json", "meta.json"}
        second = prepared()
        assert second.folder == first.folder
        assert {path.name: path.stat().st_mtime_ns for path in second.folder.iterdir()} == times
        assert (second.train_size, second.corpus_sha256) == (first.train_size, first.corpus_sha256)
        np.testing.assert_array_equal(second.train, first.train)
        other = prepared(seq_len=9, batch_size=2, validation_tokens=7)  # the tokens are the same
        assert other.folder == first.folder

    @pytest.mark.parametrize(
        "changes", [{"validation_percent": 21}, {"tokenizer": "bpe"}], ids=["split", "tokenizer"]
    )
    def test_has_a_folder_per_config(self, prepared: Prepare, changes: dict[str, object]) -> None:
        assert prepared(**changes).folder != prepared().folder
        assert prepared(**changes).corpus_sha256 == prepared().corpus_sha256

    @pytest.mark.parametrize("change", ["content", "name", "another"])
    def test_has_a_folder_per_corpus(self, prepared: Prepare, texts: Path, change: str) -> None:
        before = prepared()
        if change == "content":
            (texts / "0.txt").write_text((texts / "0.txt").read_text().replace("line", "LINE"))
        elif change == "name":
            (texts / "0.txt").rename(texts / "zero.txt")
        else:
            (texts / "another.txt").write_text("another")
        after = prepared()
        assert after.folder != before.folder
        assert after.corpus_sha256 != before.corpus_sha256

    def test_does_not_depend_on_where_the_corpus_lies(
        self, prepared: Prepare, texts: Path, tmp_path: Path
    ) -> None:
        moved = shutil.copytree(texts, tmp_path / "moved")
        data = prepare(config_of(moved, tmp_path / "cache"))
        assert data.folder == prepared().folder

    @pytest.mark.parametrize("name", ["train.bin", "validation.bin", "tokenizer.json", "meta.json"])
    @pytest.mark.parametrize("damage", ["truncated", "flipped", "removed"])
    def test_is_rebuilt_where_damaged(self, prepared: Prepare, name: str, damage: str) -> None:
        sound = prepared()
        content = {path.name: path.read_bytes() for path in sound.folder.iterdir()}
        file = sound.folder / name
        if damage == "truncated":
            file.write_bytes(content[name][:-2])
        elif damage == "flipped":
            file.write_bytes(bytes([content[name][0] ^ 1]) + content[name][1:])
        else:
            file.unlink()
        assert read_meta(sound.folder) is None
        assert prepared().folder == sound.folder
        assert {path.name: path.read_bytes() for path in sound.folder.iterdir()} == content

    def test_is_rebuilt_where_a_number_in_it_was_flipped(self, prepared: Prepare) -> None:
        sound = prepared()
        meta = sound.folder / "meta.json"
        text = meta.read_text()
        meta.write_text(text.replace(f": {sound.train_size.num_tokens}", ": 1"))
        assert meta.read_text() != text
        assert prepared().train_size == sound.train_size
        assert meta.read_text() == text

    def test_leftovers_of_a_killed_process_are_removed_after_a_day(
        self, prepared: Prepare, tmp_path: Path
    ) -> None:
        left = [tmp_path / "cache" / f".key.{name}.unfinished" for name in ("old", "at_work")]
        for folder in left:
            folder.mkdir(parents=True)
            (folder / "train.bin").write_bytes(b"half")
        old, at_work = left
        two_days_ago = time.time() - 2 * 86_400
        for path in (old / "train.bin", old, at_work):  # into `at_work` something is still written
            os.utime(path, (two_days_ago, two_days_ago))
        folder = prepared().folder
        assert set((tmp_path / "cache").iterdir()) == {folder, at_work}

    def test_below_a_file_is_rejected(self, texts: Path, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        message = r"data\.cache_dir: '.*file/cache' cannot be written \(Not a directory\)"
        with pytest.raises(ConfigError, match=message):
            prepare(config_of(texts, tmp_path / "file" / "cache"))


def set_age(path: Path, seconds: float) -> None:
    changed = time.time() - seconds
    os.utime(path, (changed, changed))


class TestKnownCorpus:
    """Corpora whose files date from yesterday, so that size and time identify them."""

    @pytest.fixture(autouse=True)
    def _yesterday(self, texts: Path) -> None:
        for path in texts.iterdir():
            set_age(path, 86_400)

    @pytest.fixture
    def read(self, monkeypatch: pytest.MonkeyPatch) -> list[str]:
        """Names of the documents whose text was read."""
        names: list[str] = []
        documents = TextConfig.documents

        def watched(self: TextConfig) -> Any:
            for document in documents(self):
                names.append(document.name)
                yield document

        monkeypatch.setattr(TextConfig, "documents", watched)
        return names

    def test_is_not_read_again(self, prepared: Prepare, read: list[str]) -> None:
        before = prepared()
        assert len(read) == 2 * 40  # to plan, and to encode
        read.clear()
        after = prepared(seq_len=7)
        assert read == []
        assert after.documents == before.documents
        assert after.folder == before.folder
        prepared(tokenizer="bpe")  # whose tokens are not there
        assert read

    @pytest.mark.parametrize("change", ["time", "content", "size", "new", "removed", "renamed"])
    def test_is_read_again_if_a_file_changed(
        self, prepared: Prepare, texts: Path, read: list[str], change: str
    ) -> None:
        before = prepared()
        read.clear()
        file = texts / "3.txt"
        time_ns = file.stat().st_mtime_ns
        if change == "time":
            set_age(file, 3600)
        elif change == "content":
            file.write_text(file.read_text().replace("line", "LINE"))
            set_age(file, 3600)
        elif change == "size":
            file.write_text(file.read_text() + "more")
            os.utime(file, ns=(time_ns, time_ns))
        elif change == "new":
            shutil.copyfile(file, texts / "new.txt")
        elif change == "removed":
            file.unlink()
        else:
            file.rename(texts / "zero.txt")
        after = prepared()
        assert read
        assert (after.documents == before.documents) == (change == "time")

    def test_is_read_again_for_other_files_of_the_same_sizes_and_times(
        self, prepared: Prepare, texts: Path, tmp_path: Path
    ) -> None:
        before = prepared()
        copied = shutil.copytree(texts, tmp_path / "copied")  # with the times
        file = copied / "3.txt"
        time_ns = file.stat().st_mtime_ns
        file.write_text(file.read_text().replace("line", "LINE"))
        os.utime(file, ns=(time_ns, time_ns))
        other = prepare(config_of(copied, tmp_path / "cache"))
        assert other.corpus_sha256 != before.corpus_sha256
        # The same files under other names, `texts/3.txt`, by which they are drawn.
        named = prepare(config_of(tmp_path / "tex*/*.txt", tmp_path / "cache"))
        assert named.corpus_sha256 != before.corpus_sha256

    def test_is_not_remembered_if_it_changes_while_it_is_read(
        self, prepared: Prepare, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        stamps = iter(["before", "after"])
        monkeypatch.setattr(TextConfig, "stamp", lambda self: next(stamps))
        prepared()
        assert not (tmp_path / "cache" / "known_corpora").exists()

    def test_is_read_again_if_a_file_changed_a_moment_ago(
        self, prepared: Prepare, texts: Path, read: list[str]
    ) -> None:
        (texts / "3.txt").touch()
        prepared()
        read.clear()
        prepared()
        assert len(read) == 40

    @pytest.mark.parametrize("content", ["", "{}", "no object", '{"count": "x"}'])
    def test_is_read_again_if_its_cache_entry_is_damaged(
        self, prepared: Prepare, tmp_path: Path, read: list[str], content: str
    ) -> None:
        before = prepared()
        (note,) = (tmp_path / "cache" / "known_corpora").iterdir()
        note.write_text(content)
        read.clear()
        assert prepared().documents == before.documents
        assert len(read) == 40


def test_memory_does_not_grow_with_a_file(tmp_path: Path) -> None:
    file = tmp_path / "large.txt"
    file.write_bytes((b"x" * 1023 + b"\n") * (24 << 10))
    tracemalloc.start()
    try:
        data = prepare(config_of(file, tmp_path / "cache"))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert data.train_size.num_bytes + data.validation_size.num_bytes == 24 << 20
    assert peak < 12 << 20
    assert type(data.train) is np.memmap


def test_the_standard_library_is_split_by_files(tmp_path: Path) -> None:
    data = prepare(DataConfig(cache_dir=str(tmp_path)))
    assert data.train_size.num_documents > 200
    share = data.validation_size.num_bytes / data.train_size.num_bytes
    assert 0.005 < share < 0.2  # 5% of the files, which differ in size


def test_stages_are_logged(prepared: Prepare, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", "moe_ffn")
    prepared()
    assert caplog.messages[:2] == ["data: reading the corpus", "data: preparing 0.0 MB of text"]
    caplog.clear()
    prepared()
    assert caplog.messages[:1] == ["data: reading the corpus"]
    assert not any("preparing" in message for message in caplog.messages)


def test_a_tokenizer_file_is_known_by_what_it_holds(prepared: Prepare, tmp_path: Path) -> None:
    """Another tokenizer at the same path gives other tokens; a copy elsewhere gives the same folder."""
    first, second = tmp_path / "first.json", tmp_path / "second.json"
    bpe = BPEConfig(vocab_size=512).build([b"a line of a text with an \xc3\xa9 in it\n" * 9])
    for path, tokenizer in ((first, BytesConfig().build(())), (second, bpe)):
        path.write_text(json.dumps(tokenizer.to_dict()))
    before = prepared(tokenizer={"type": "file", "path": str(first)})
    after = prepared(tokenizer={"type": "file", "path": str(second)})
    shutil.copy(second, first)
    again = prepared(tokenizer={"type": "file", "path": str(first)})

    assert before.tokenizer.vocab_size != after.tokenizer.vocab_size
    assert again.folder == after.folder != before.folder
