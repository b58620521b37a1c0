"""Corpora from Hugging Face datasets."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from typing import Any, Literal

from pydantic import Field

from moe_ffn.config.errors import (
    ConfigError,
    did_you_mean,
    expand_path,
    first_line,
    import_optional,
)
from moe_ffn.data.corpus import CorpusConfig, Document, Split, blocks


class HFDatasetConfig(CorpusConfig, frozen=True):
    """A dataset read by Hugging Face `datasets`; each row is one document."""

    type: Literal["hf_dataset"] = "hf_dataset"

    path: str = Field(min_length=1)
    """Name on the hub (`roneneldan/TinyStories`), folder written by `save_to_disk`, local folder, or file
    (.json, .jsonl, .ndjson, .csv, .parquet or .txt)."""
    name: str | None = None
    """Configuration of a dataset that has several (`wikitext-2-raw-v1`)."""
    split: str = Field(default="train", min_length=1)
    """Split to train on; without `validation_split`, some of its rows are used for validation."""
    validation_split: str | None = Field(default=None, min_length=1)
    """Split to validate on; by default `data.validation_percent` percent of the rows of `split`."""
    text_column: str = "text"
    """Column that holds the text."""

    def documents(self) -> Iterator[Document]:
        """Return rows as documents, named by their index; a missing text is empty."""
        if self.validation_split is not None and self.validation_split == self.split:
            raise ConfigError(
                f"data.corpus.validation_split ('{self.split}') must differ from data.corpus.split; "
                f"leave it out to validate on a part of '{self.split}'"
            )
        train = self._rows("split", self.split)
        splits: list[tuple[Any, Split | None]] = [(train, None)]
        if self.validation_split is not None:
            validation = self._rows("validation_split", self.validation_split)
            splits = [(train, "train"), (validation, "validation")]
        return (
            Document(str(index), blocks(io.BytesIO((text or "").encode())), split)
            for rows, split in splits
            for index, text in enumerate(
                text for batch in rows.iter(_ROWS_AT_ONCE) for text in batch[self.text_column]
            )
        )

    def _rows(self, key: str, split: str) -> Any:
        """Return the text column of a split; `key` is the option that named the split."""
        rows, column = self._load(key, split), self.text_column
        if column not in rows.column_names:
            hint = did_you_mean(column, rows.column_names)
            raise ConfigError(
                f"data.corpus.text_column: '{self.path}' has no column '{column}'{hint}; available: "
                f"{', '.join(rows.column_names)}"
            )
        kind = getattr(rows.features[column], "dtype", "a nested type")
        if kind not in ("string", "large_string"):
            raise ConfigError(
                f"data.corpus.text_column: '{column}' of '{self.path}' must hold text, not {kind}; "
                "name another column"
            )
        return rows.select_columns([column])

    def _load(self, key: str, split: str) -> Any:
        need = "data.corpus.type: 'hf_dataset' needs the datasets package"
        datasets = import_optional("datasets", need)
        if not sys.stderr.isatty():
            datasets.disable_progress_bars()
        path, name = self.path, self.name
        local = expand_path(path, "data.corpus.path")
        try:
            if (local / "state.json").is_file() or (local / "dataset_dict.json").is_file():
                saved = datasets.load_from_disk(str(local))
                splits = saved if isinstance(saved, dict) else {str(saved.split or "train"): saved}
                if split in splits:
                    return splits[split]
                known = ", ".join(map(str, splits))
                raise ConfigError(
                    f"data.corpus.{key}: '{path}' has no '{split}'; available: {known}"
                )
            if local.is_file():
                if (reader := _READERS.get(local.suffix.lower())) is None:
                    raise ConfigError(
                        f"data.corpus.path: '{local}' must end in one of {', '.join(_READERS)}; "
                        "for other text files use data.corpus.type: text"
                    )
                return datasets.load_dataset(reader, name, data_files=str(local), split=split)
            return datasets.load_dataset(str(local) if local.is_dir() else path, name, split=split)
        except ConfigError:
            raise
        except Exception as error:  # `datasets` raises errors of its readers, of any type
            cause: BaseException = error
            while cause.__cause__ is not None:  # the first cause has the most precise message
                cause = cause.__cause__
            why = first_line(cause)
            message = f"path: '{path}' cannot be loaded ({type(error).__name__}: {why})"
            if "nknown split" in why:
                message = f"{key}: '{path}' has no '{split}': {why}"
            raise ConfigError(f"data.corpus.{message}") from error


_READERS = {
    ".json": "json",
    ".jsonl": "json",
    ".ndjson": "json",
    ".csv": "csv",
    ".parquet": "parquet",
    ".txt": "text",
    ".text": "text",
}

_ROWS_AT_ONCE = 1024
