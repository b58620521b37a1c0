from __future__ import annotations

import pytest

from moe_ffn.data.corpus import StdlibConfig, TextConfig
from moe_ffn.data.prepare import DataConfig
from moe_ffn.data.tokenizer import BPEConfig
from tests.helpers.shape_family import mistakes


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
def test_bad_options_are_refused_by_path(values: dict[str, object], message: str) -> None:
    (line,) = mistakes(DataConfig, values)
    assert message in line


def test_a_path_in_the_wrong_place_is_told_where_paths_go() -> None:
    (line,) = mistakes(DataConfig, "my_texts")
    assert line == (
        "must be a mapping of options, got 'my_texts'; for your own text files use data.corpus: "
        "{type: text, paths: [PATH]}"
    )
