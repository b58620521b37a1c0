from __future__ import annotations

import dataclasses
import gzip
import hashlib
import io
import json
import os
import sys
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from experiments import corpora
from moe_ffn.config.errors import ConfigError
from moe_ffn.data import corpus
from moe_ffn.data.corpus import (
    BLOCK_BYTES,
    Document,
    StdlibConfig,
    TextConfig,
    blocks,
    text_boundary,
)
from moe_ffn.data.hf_dataset import HFDatasetConfig
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.data.tokenizer import BPEConfig
from tests.helpers.shape_family import mistakes


def names(*paths: str | Path) -> list[str]:
    return [document.name for document in TextConfig(paths=tuple(map(str, paths))).documents()]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with three texts and files that must be skipped."""
    folder = tmp_path / "books"
    for name in ("b.txt", "a.md", "deep/c.txt", ".hidden", ".git/config", "deep/.secret/d.txt"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(f"content of {name}")
    (folder / "image.png").write_bytes(b"\x89PNG\0\1")
    (folder / "utf16.txt").write_text("text", encoding="utf-16-le")
    (folder / "latin1.txt").write_bytes("café".encode("latin-1"))
    return folder


def test_the_standard_library_is_megabytes_without_tests_and_tables() -> None:
    documents = list(StdlibConfig().documents())
    names = [document.name for document in documents]
    assert len(names) > 200
    assert 5e6 < sum(len(block) for document in documents for block in document.blocks) < 12e6
    assert names == sorted(names)
    assert {"argparse.py", "asyncio/tasks.py"} <= set(names)
    folders = {part for name in names for part in name.split("/")[:-1]}
    assert not folders & {"test", "tests", "encodings", "idlelib", "site-packages", "ensurepip"}


class TestText:
    def test_a_file_is_one_document(self, folder: Path) -> None:
        (document,) = TextConfig(paths=(str(folder / "deep" / "c.txt"),)).documents()
        assert document.name == "c.txt"
        assert b"".join(document.blocks) == b"content of deep/c.txt"

    def test_a_folder_is_searched_but_for_hidden_and_binary_files(self, folder: Path) -> None:
        assert names(folder) == ["a.md", "b.txt", "deep/c.txt"]

    def test_skipped_files_are_logged_once(
        self, folder: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        caplog.set_level("INFO")
        names(folder)
        names(folder)
        assert caplog.messages == [
            f"data: files skipped, since they are not UTF-8 text: 3, such as '{folder}/image.png'"
        ]

    @pytest.mark.parametrize(
        ("pattern", "expected"),
        [
            ("*.txt", ["b.txt"]),
            ("**/*.txt", ["b.txt", "deep/c.txt"]),
            ("**", ["a.md", "b.txt", "deep/c.txt"]),
            ("d*/?.txt", ["deep/c.txt"]),
        ],
    )
    def test_a_glob_names_the_files_it_matches(
        self, folder: Path, pattern: str, expected: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert names(folder / pattern) == expected
        monkeypatch.chdir(folder)
        assert names(pattern) == expected

    def test_a_file_named_like_a_glob_is_read(self, folder: Path) -> None:
        (folder / "[1].txt").write_text("one")
        assert names(folder / "[1].txt") == ["[1].txt"]

    def test_a_file_named_twice_is_one_document(self, folder: Path) -> None:
        assert names(folder / "b.txt", folder) == ["b.txt", "a.md", "deep/c.txt"]

    def test_empty_files_are_accepted_and_pipes_are_skipped(self, folder: Path) -> None:
        (folder / "empty.txt").touch()
        os.mkfifo(folder / "pipe.txt")
        assert names(folder) == ["a.md", "b.txt", "deep/c.txt", "empty.txt"]

    @pytest.mark.parametrize(
        ("given", "message"),
        [
            ("x.txt", r"'x\.txt' does not exist, .* \(looked in '.*'\); check the spelling"),
            ("*.tex", r"'\*\.tex' matches no file; '\*\*' searches folders within folders"),
            ("a\nb", r"'a\\nb' is a text of several lines; give a file with this text"),
            ("image.png", r"'image\.png' is not UTF-8 text; convert it to UTF-8 or leave it out"),
            ("utf16.txt", r"'utf16\.txt' is not UTF-8 text"),
            ("*.png", r"'\*\.png' is empty, or has only hidden files"),
            ("empty*", r"'empty\*' is empty, or has only hidden files"),
        ],
    )
    def test_bad_paths_are_rejected_by_name(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch, given: str, message: str
    ) -> None:
        monkeypatch.chdir(folder)
        (folder / "empty.txt").touch()
        (folder / "empty2.txt").touch()
        with pytest.raises(ConfigError, match=r"^data\.corpus\.paths: " + message):
            names(given)

    @pytest.mark.parametrize("pattern", ["**", "**/*.txt", "*/../b.txt", "."])
    def test_loops_of_links_come_to_an_end(self, folder: Path, pattern: str) -> None:
        for number in range(8):  # `glob.glob` would enter each of them in each of them, forty deep
            (folder / "deep" / f"loop{number}").symlink_to(folder, target_is_directory=True)
        (folder / "self.txt").symlink_to("self.txt")
        (folder / "nowhere.txt").symlink_to("no.such")
        assert set(names(folder / pattern)) <= {"a.md", "b.txt", "deep/c.txt", "deep/../b.txt"}
        assert names(folder / pattern)

    @pytest.mark.parametrize(
        ("target", "message"),
        [
            ("link.txt", r"'link\.txt' does not exist, or is a broken link"),
            ("/dev/null", r"'link\.txt' is neither a file nor a folder"),
        ],
    )
    def test_paths_that_are_not_files_are_rejected(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, message: str
    ) -> None:
        monkeypatch.chdir(tmp_path)
        (tmp_path / "link.txt").symlink_to(target)
        with pytest.raises(ConfigError, match=r"^data\.corpus\.paths: " + message):
            names("link.txt")

    @pytest.mark.parametrize("suffix", [".json", ".jsonl", ".ndjson", ".csv", ".parquet"])
    def test_records_are_rejected_with_what_reads_them(self, folder: Path, suffix: str) -> None:
        path = folder / f"rows{suffix}"
        path.write_text('{"text": "x"}\n')
        message = (
            rf"data\.corpus\.paths: '{path}' holds records, .*; use --data\.corpus\.type hf_dataset "
            rf"--data\.corpus\.path {path} --data\.corpus\.text_column NAME"
        )
        with pytest.raises(ConfigError, match=message):
            names(path)

    def test_a_folder_or_a_glob_of_only_records_is_rejected(self, folder: Path) -> None:
        for name in ("a.jsonl", "b.JSONL"):
            (folder / "deep" / name).write_text("{}\n")
        with pytest.raises(ConfigError, match="holds records"):
            names(folder / "deep" / "*.[jJ]*")
        (folder / "deep" / "c.txt").unlink()
        with pytest.raises(ConfigError, match=r"a\.jsonl' holds records"):
            names(folder / "deep")

    @pytest.mark.parametrize("suffix", [".gz", ".zst", ".zip"])
    def test_a_compressed_file_is_rejected(self, folder: Path, suffix: str) -> None:
        (folder / f"x.txt{suffix}").write_bytes(b"\x1f\x8b")
        with pytest.raises(ConfigError, match=rf"is compressed \({suffix}\); unpack it first"):
            names(folder / f"x.txt{suffix}")

    def test_a_folder_that_cannot_be_listed_is_rejected(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # Root may list anything, so the system's answer is replaced.
        scandir = os.scandir

        def reject(path: str) -> object:
            if str(path).endswith("deep"):
                raise PermissionError(13, "Permission denied", str(path))
            return scandir(path)

        monkeypatch.setattr(os, "scandir", reject)
        with pytest.raises(
            ConfigError, match=r"data\.corpus: '.*/deep' cannot be read \(Permission"
        ):
            names(folder)


class TestBlocks:
    def test_are_cut_at_line_ends(self) -> None:
        line = b"x" * 99 + b"\n"
        text = line * 2000
        parts = list(blocks(io.BytesIO(text)))
        assert b"".join(parts) == text
        assert [len(part) for part in parts] == [65_500, 65_500, 65_500, 3_500]  # 655 lines each

    def test_are_cut_at_characters_where_there_is_no_line_end(self) -> None:
        text = ("é" * BLOCK_BYTES).encode()
        parts = list(blocks(io.BytesIO(text)))
        assert "".join(part.decode() for part in parts).encode() == text
        assert max(map(len, parts)) <= BLOCK_BYTES

    @given(
        given=st.text(alphabet="a\né漢🙂", max_size=200) | st.binary(max_size=200),
        size=st.integers(4, 40),
    )
    def test_lose_nothing(self, given: str | bytes, size: int) -> None:
        content = given if isinstance(given, bytes) else given.encode()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(corpus, "BLOCK_BYTES", size)
            parts = list(blocks(io.BytesIO(content)))
        assert b"".join(parts) == content
        assert all(0 < len(part) <= size for part in parts)
        if isinstance(given, str):
            assert "".join(part.decode() for part in parts) == given


@pytest.mark.parametrize(
    ("text", "at", "expected"),
    [
        ("one\ntwo\nthree", 10, 8),  # after "two\n"
        ("one\ntwo\nthree", 8, 8),
        ("abcdef", 3, 3),
        ("aé", 2, 1),  # 2 lies within the two bytes of é
        ("aéb", 3, 3),
        ("🙂🙂", 7, 4),
    ],
)
def test_a_text_boundary_is_after_a_line_or_between_characters(
    text: str, at: int, expected: int
) -> None:
    assert text_boundary(text.encode(), at) == expected


def test_members_are_picked_by_one_word() -> None:
    config = DataConfig.model_validate({"corpus": "stdlib", "tokenizer": "bpe"})
    assert config.corpus == StdlibConfig()
    assert config.tokenizer == BPEConfig(vocab_size=4096)


@pytest.mark.parametrize("given", ["a.txt", ["a.txt"], ("a.txt",)], ids=["text", "list", "tuple"])
def test_paths_are_a_list_or_one_path(given: object) -> None:
    config = DataConfig.model_validate({"corpus": {"type": "text", "paths": given}})
    assert config.corpus == TextConfig(paths=("a.txt",))
    assert config == DataConfig.model_validate(config.to_dict())


TEXT = {"type": "text"}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"corpus": {**TEXT, "paths": []}}, "corpus.paths: must not be empty, got []"),
        ({"corpus": {**TEXT, "paths": 3}}, "corpus.paths: must be a list, got 3"),
        ({"corpus": {**TEXT, "paths": ["a", ""]}}, "corpus.paths.1: must not be empty, got ''"),
        ({"tokenizer": {"type": "bpe", "vocab_size": 300}}, "tokenizer.vocab_size: must be at least 512"),
        ({"validation_percent": 51}, "validation_percent: must be at most 50, got 51"),
        ({"validation_percent": 0}, "validation_percent: must be at least 1, got 0"),
        ({"validation_tokens": 0}, "validation_tokens: must be at least 1, got 0"),
    ],
)  # fmt: skip
def test_bad_options_are_rejected_by_path(values: dict[str, object], message: str) -> None:
    (line,) = mistakes(DataConfig, values)
    assert message in line


def test_a_misplaced_path_gets_an_error_naming_its_option() -> None:
    (line,) = mistakes(DataConfig, "my_texts")
    assert line == (
        "must be a mapping of options, got 'my_texts'; for your own text files use data.corpus: "
        "{type: text, paths: [PATH]}"
    )


# -- the corpora of studies


def archive(mode: str, files: dict[str, bytes]) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode=mode) as tar:  # pyright: ignore[reportCallIssue, reportArgumentType]
        for name, content in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            tar.addfile(entry, io.BytesIO(content))
    return buffer.getvalue()


def debian_package(member: str, content: bytes) -> bytes:
    """An ar archive as dpkg writes it; the first part has an odd size, after which a byte is padding."""
    package = b"!<arch>\n"
    for name, part in (
        (b"debian-binary", b"2.0"),
        (b"data.tar.xz", archive("w:xz", {member: content})),
    ):
        package += b"%-16s%-12d%-6d%-6d%-8s%-10d`\n" % (name, 0, 0, 0, b"100644", len(part)) + part
        package += b"\n" * (len(part) % 2)
    return package


C_FILES = [f"mm/file_{n}.c" for n in range(40)]


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with both packages, small, whose checksums the program expects."""
    texts = ["Documentation/mm/slub.rst", "Documentation/atomic_t.txt", *C_FILES]
    others = ["mm/slab.h", "Documentation/conf.py", "tools/notes.txt"]
    kernel = archive("w:xz", {f"linux-source-6.1/{name}": name.encode() for name in texts + others})
    for constant, content in (
        ("KERNEL", kernel),
        ("DICTIONARY", gzip.compress(b"Abuse \\A*buse\\")),
    ):
        wanted = getattr(corpora, constant)
        package = debian_package(wanted.member, content)
        (tmp_path / wanted.name).write_bytes(package)
        digest = hashlib.sha256(package).hexdigest()
        monkeypatch.setattr(corpora, constant, dataclasses.replace(wanted, sha256=digest))
    return tmp_path


def test_corpora_are_the_same_texts_of_their_packages_everywhere(packages: Path) -> None:
    assert corpora.main([str(packages / "data"), "--packages", str(packages)]) == 0
    assert (packages / "data/gcide.txt").read_bytes() == b"Abuse \\A*buse\\"
    kernel = packages / "data/kernel"
    found = {file.relative_to(kernel).as_posix() for file in kernel.rglob("*") if file.is_file()}
    kept = {f"mm/file_{n}.c" for n in (1, 6, 12, 14, 29)}
    assert found == {"docs/mm/slub.rst", "docs/atomic_t.txt"} | {f"c/{name}" for name in kept}
    assert (kernel / "c/mm/file_12.c").read_text() == "mm/file_12.c"
    with pytest.raises(ConfigError, match="kernel' exists; delete it, or give another folder"):
        corpora.main([str(packages / "data"), "--packages", str(packages)])


def test_another_package_than_the_expected_one_is_rejected(packages: Path) -> None:
    path = packages / corpora.DICTIONARY.name
    path.write_bytes(b"something else")
    with pytest.raises(
        ConfigError, match=r"dict-gcide_.*' has the SHA-256 \w+, not \w+; delete it"
    ):
        corpora.main([str(packages / "data"), "--packages", str(packages)])


def test_a_package_that_has_left_the_mirror_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(corpora, "MIRROR", (tmp_path / "mirror").as_uri())
    with pytest.raises(ConfigError) as rejected:
        corpora.main([str(tmp_path / "data")])
    assert "cannot be downloaded" in str(rejected.value)
    assert "get dict-gcide_0.48.5+nmu2_all.deb from snapshot.debian.org" in str(rejected.value)
    assert not list((tmp_path / "data/packages").iterdir())


# -- datasets of Hugging Face


datasets = pytest.importorskip("datasets")

ROWS = [
    {"text": text, "label": index} for index, text in enumerate(["one\n1", "", "zwölf", "four"])
]
TEXTS = [row["text"] for row in ROWS]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "hf_cache"))


def read(path: Path | str, **options: Any) -> list[Document]:
    return list(HFDatasetConfig(path=str(path), **options).documents())


def content(document: Document) -> str:
    return b"".join(document.blocks).decode()


def as_json(folder: Path) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


def as_csv(folder: Path) -> Path:
    datasets.Dataset.from_list(ROWS).to_csv(str(folder / "rows.csv"))
    return folder / "rows.csv"


def as_folder(folder: Path) -> Path:
    (folder / "data").mkdir()
    datasets.Dataset.from_list(ROWS).to_parquet(str(folder / "data" / "train.parquet"))
    return folder / "data"


def as_file_of_folder(folder: Path) -> Path:
    return as_folder(folder) / "train.parquet"


def as_saved(folder: Path) -> Path:
    datasets.Dataset.from_list(ROWS).save_to_disk(str(folder / "saved"))
    return folder / "saved"


def as_saved_splits(folder: Path) -> Path:
    of_test = datasets.Dataset.from_list([{"text": f"t{index}"} for index in range(3)])
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(ROWS), "test": of_test})
    splits.save_to_disk(str(folder / "splits"))
    return folder / "splits"


@pytest.mark.parametrize(
    "write", [as_json, as_csv, as_file_of_folder, as_folder, as_saved, as_saved_splits]
)
def test_rows_are_documents_named_by_their_index(
    tmp_path: Path, write: Callable[[Path], Path]
) -> None:
    read_back = read(write(tmp_path))
    assert [document.name for document in read_back] == ["0", "1", "2", "3"]
    assert [content(document) for document in read_back] == TEXTS
    assert {document.split for document in read_back} == {None}


def test_missing_texts_are_empty_documents_and_the_column_can_be_set(
    tmp_path: Path,
) -> None:
    (tmp_path / "rows.jsonl").write_text('{"story": null}\n{"story": "x"}\n')
    found = read(tmp_path / "rows.jsonl", text_column="story")
    assert [content(document) for document in found] == ["", "x"]


def test_a_validation_split_follows_the_training_split(tmp_path: Path) -> None:
    read_back = read(as_saved_splits(tmp_path), validation_split="test")
    assert [document.split for document in read_back] == ["train"] * 4 + ["validation"] * 3
    assert [content(document) for document in read_back] == [*TEXTS, "t0", "t1", "t2"]


def test_prepare_keeps_the_given_splits(tmp_path: Path) -> None:
    corpus = HFDatasetConfig(path=str(as_saved_splits(tmp_path)), validation_split="test")
    data = prepare(DataConfig(corpus=corpus, seq_len=4, cache_dir=str(tmp_path)))
    assert data.train_size.num_documents == 3  # the empty row is none
    assert data.tokenizer.decode(data.validation[:]) == "t0t1t2"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"text_column": "txt"}, "text_column: .* has no column 'txt'; did you mean 'text'.; available"),
        ({"text_column": "label"}, "text_column: 'label' of '.*' must hold text, not int64"),
        ({"split": "dev"}, r"split: '.*rows\.jsonl' has no 'dev': .*train"),
        ({"validation_split": "dev"}, "validation_split: '.*' has no 'dev': .*train"),
        (
            {"validation_split": "train"},
            r"validation_split \('train'\) must differ from data\.corpus\.split; leave it out to validate on "
            "a part of 'train'",
        ),
    ],
    ids=["column", "type", "split", "validation_split", "same"],
)  # fmt: skip
def test_bad_columns_and_splits_are_rejected_by_path(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.corpus\.{message}"):
        read(as_json(tmp_path), **options)


def test_a_split_that_was_not_saved_is_rejected(tmp_path: Path) -> None:
    message = r"data\.corpus\.split: '.*splits' has no 'dev'; available: train, test"
    with pytest.raises(ConfigError, match=message):
        read(as_saved_splits(tmp_path), split="dev")


def test_a_damaged_file_is_rejected_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": ')
    with pytest.raises(
        ConfigError, match=r"data\.corpus\.path: '.*' cannot be loaded \(.*JSON"
    ) as raised:
        read(tmp_path / "rows.jsonl")
    assert "\n" not in str(raised.value)


def test_an_unknown_kind_of_file_is_rejected(tmp_path: Path) -> None:
    (tmp_path / "rows.xml").touch()
    message = r"data\.corpus\.path: '.*rows\.xml' must end in one of \.json, .*; for other text"
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "rows.xml")


def test_staying_offline_without_an_earlier_download_is_rejected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    message = r"data\.corpus\.path: 'someone/stories' cannot be loaded \(ConnectionError: "
    with pytest.raises(ConfigError, match=message):
        read("someone/stories")


def test_missing_datasets_is_reported_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    message = r"data\.corpus\.type: 'hf_dataset' needs .*: pip install datasets"
    with pytest.raises(ConfigError, match=message):
        read("someone/stories")
