from __future__ import annotations

import pytest
from pydantic import ValidationError

from moe_ffn.config.base import help_texts
from moe_ffn.config.errors import explain
from moe_ffn.data.corpus import StdlibConfig, TextConfig
from moe_ffn.data.hf_dataset import HFDatasetConfig
from moe_ffn.data.prepare import DataConfig
from moe_ffn.data.tokenizer import BPEConfig, BytesConfig


def complaints(values: dict[str, object]) -> list[str]:
    with pytest.raises(ValidationError) as raised:
        DataConfig.model_validate(values)
    return explain(raised.value)


def test_defaults_are_the_standard_library_as_bytes() -> None:
    config = DataConfig()
    assert config.corpus == StdlibConfig()
    assert config.tokenizer == BytesConfig()
    assert config == DataConfig.model_validate(config.to_dict())


def test_members_are_picked_by_one_word() -> None:
    config = DataConfig.model_validate({"corpus": "stdlib", "tokenizer": "bpe"})
    assert config.corpus == StdlibConfig()
    assert config.tokenizer == BPEConfig(vocab_size=4096)


@pytest.mark.parametrize("given", ["a.txt", ["a.txt"], ("a.txt",)], ids=["text", "list", "tuple"])
def test_paths_are_a_list_or_one_path(given: object) -> None:
    config = DataConfig.model_validate({"corpus": {"type": "text", "paths": given}})
    assert config.corpus == TextConfig(paths=("a.txt",))
    assert config == DataConfig.model_validate(config.to_dict())


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"corpus": {"type": "text", "paths": []}}, "corpus.paths: must not be empty, got []"),
        ({"corpus": {"type": "text", "paths": 3}}, "corpus.paths: must be a list, got 3"),
        (
            {"corpus": {"type": "text", "paths": ["a.txt", ""]}},
            "corpus.paths.1: must not be empty, got ''",
        ),
        ({"corpus": {"type": "hf_dataset", "path": ""}}, "corpus.path: must not be empty, got ''"),
        (
            {"tokenizer": {"type": "bpe", "vocab_size": 300}},
            "tokenizer.vocab_size: must be at least 512, got 300",
        ),
        ({"seq_len": 0}, "seq_len: must be at least 1, got 0"),
        ({"batch_size": 0}, "batch_size: must be at least 1, got 0"),
        ({"validation_percent": 51}, "validation_percent: must be at most 50, got 51"),
        ({"validation_percent": 0}, "validation_percent: must be at least 1, got 0"),
        ({"validation_tokens": 0}, "validation_tokens: must be at least 1, got 0"),
        ({"cache_dir": ""}, "cache_dir: must not be empty, got ''"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_options_are_refused_by_path(values: dict[str, object], message: str) -> None:
    (line,) = complaints(values)
    assert message in line


@pytest.mark.parametrize(
    "config",
    [DataConfig, StdlibConfig, TextConfig, HFDatasetConfig, BytesConfig, BPEConfig],
    ids=lambda config: config.__name__,
)
def test_every_option_has_a_help_text(config: type[DataConfig]) -> None:
    undocumented = [name for name, text in help_texts(config).items() if not text]
    assert [name for name in undocumented if name != "type"] == []
