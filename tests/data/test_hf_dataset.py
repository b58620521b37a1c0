from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.data.corpus import Document
from moe_ffn.data.hf_dataset import HFDatasetConfig
from moe_ffn.data.prepare import DataConfig, prepare

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
def test_bad_columns_and_splits_are_refused_by_path(
    tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=rf"^data\.corpus\.{message}"):
        read(as_json(tmp_path), **options)


def test_a_split_that_was_not_saved_is_refused(tmp_path: Path) -> None:
    message = r"data\.corpus\.split: '.*splits' has no 'dev'; available: train, test"
    with pytest.raises(ConfigError, match=message):
        read(as_saved_splits(tmp_path), split="dev")


def test_a_damaged_file_is_refused_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": ')
    with pytest.raises(
        ConfigError, match=r"data\.corpus\.path: '.*' cannot be loaded \(.*JSON"
    ) as raised:
        read(tmp_path / "rows.jsonl")
    assert "\n" not in str(raised.value)


def test_an_unknown_kind_of_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "rows.xml").touch()
    message = r"data\.corpus\.path: '.*rows\.xml' must end in one of \.json, .*; for other text"
    with pytest.raises(ConfigError, match=message):
        read(tmp_path / "rows.xml")


def test_staying_offline_without_an_earlier_download_is_refused(
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
