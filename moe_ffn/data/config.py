"""What can be said about the data in a config file: the corpus, its tokenizer, the batches."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import AfterValidator, BeforeValidator, Field

from moe_ffn.config import MOST, Config, TaggedConfig

if TYPE_CHECKING:
    from moe_ffn.data.corpus import Document
    from moe_ffn.data.tokenizer import Tokenizer


class CorpusConfig(TaggedConfig, frozen=True):
    """Where the text comes from."""

    @abstractmethod
    def documents(self) -> Iterator[Document]:
        """All documents, in the same order at every call; ConfigError where there are none."""


class StdlibConfig(CorpusConfig, frozen=True):
    """The source of the running Python's standard library: about 390 files, 8 MB."""

    type: Literal["stdlib"] = "stdlib"

    def documents(self) -> Iterator[Document]:
        from moe_ffn.data.corpus import stdlib_documents

        return stdlib_documents()


def _listed(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


def _none_empty(paths: tuple[str, ...]) -> tuple[str, ...]:
    if "" in paths:
        raise ValueError("holds an empty path; leave it out (the current folder is '.')")
    return paths


class TextConfig(CorpusConfig, frozen=True):
    """Your own UTF-8 text files; each file is one document."""

    type: Literal["text"] = "text"

    paths: Annotated[
        tuple[str, ...],
        Field(strict=False, min_length=1),
        AfterValidator(_none_empty),
        BeforeValidator(_listed, json_schema_input_type=str | tuple[str, ...]),
    ]
    """Files, folders (searched recursively) or globs (`books/**/*.txt`). Hidden and binary files
    found in a folder or by a glob are skipped. What stands in fields (.jsonl, .csv, .parquet) is for
    type hf_dataset."""

    def documents(self) -> Iterator[Document]:
        from moe_ffn.data.corpus import text_documents

        return text_documents(self.paths)


class HFDatasetConfig(CorpusConfig, frozen=True):
    """A data set read by Hugging Face `datasets`; each row is one document."""

    type: Literal["hf_dataset"] = "hf_dataset"

    path: str = Field(min_length=1)
    """A name on the hub (`roneneldan/TinyStories`), a folder written by `save_to_disk`, or a local
    folder, .json, .jsonl, .ndjson, .csv, .parquet or .txt file."""

    name: str | None = None
    """The configuration of a data set that has several (`wikitext-2-raw-v1`)."""

    split: str = Field(default="train", min_length=1)
    """The split that is trained on, and validated on where `validation_split` is not given."""

    validation_split: str | None = Field(default=None, min_length=1)
    """The split that is validated on; by default `data.validation_percent` of the rows of
    `split`."""

    text_column: str = "text"
    """The column that holds the text."""

    def documents(self) -> Iterator[Document]:
        from moe_ffn.data.hf_dataset import hf_documents

        return hf_documents(
            path=self.path,
            name=self.name,
            split=self.split,
            validation_split=self.validation_split,
            text_column=self.text_column,
        )


class TokenizerConfig(TaggedConfig, frozen=True):
    """How text becomes token ids."""

    @abstractmethod
    def build(self, text: Iterable[bytes]) -> Tokenizer:
        """The tokenizer for `text`, which is the training split, read at most once."""

    @abstractmethod
    def restore(self, values: Mapping[str, Any]) -> Tokenizer:
        """The tokenizer whose `to_dict` gave `values`."""


class BytesConfig(TokenizerConfig, frozen=True):
    """Every byte is a token: 256 values and an end of document, 257 in all; nothing to train."""

    type: Literal["bytes"] = "bytes"

    def build(self, text: Iterable[bytes]) -> Tokenizer:
        from moe_ffn.data.tokenizer import BytesTokenizer

        return BytesTokenizer()

    def restore(self, values: Mapping[str, Any]) -> Tokenizer:
        from moe_ffn.data.tokenizer import BytesTokenizer

        return BytesTokenizer.from_dict(values)


class BPEConfig(TokenizerConfig, frozen=True):
    """Byte-pair encoding over bytes (GPT-2's kind), trained on the training split."""

    type: Literal["bpe"] = "bpe"

    vocab_size: int = Field(default=4096, ge=512, le=2**24)
    """How many tokens to learn, the 256 bytes and the end of document included; a short text may
    not hold as many, and the tokenizer is then smaller."""

    def build(self, text: Iterable[bytes]) -> Tokenizer:
        from moe_ffn.data.bpe import train_bpe

        return train_bpe(text, self.vocab_size)

    def restore(self, values: Mapping[str, Any]) -> Tokenizer:
        from moe_ffn.data.bpe import BPETokenizer

        return BPETokenizer.from_dict(values)


class DataConfig(Config, frozen=True):
    """Text, tokenizer, and how the tokens are cut into batches."""

    corpus: CorpusConfig = StdlibConfig()
    """Where the text comes from."""

    tokenizer: TokenizerConfig = BytesConfig()
    """How text becomes token ids."""

    seq_len: int = Field(default=256, ge=1, le=MOST)
    """Tokens per sequence."""

    batch_size: int = Field(default=16, ge=1, le=MOST)
    """Sequences per forward pass, summed over all ranks."""

    validation_percent: int = Field(default=5, ge=1, le=50)
    """Percent of the documents that are kept for validation, each whole; a line says where that is
    another share of the text."""

    validation_tokens: int = Field(default=131_072, ge=1, le=MOST)
    """How many tokens each validation looks at, evenly spaced over the validation split."""

    cache_dir: str = Field(default="~/.cache/moe_ffn", min_length=1)
    """Where the encoded tokens are kept between runs."""
