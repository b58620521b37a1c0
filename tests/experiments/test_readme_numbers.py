"""The numbers of the README are those of the default run, and it is told when they no longer are."""

from __future__ import annotations

import json
from typing import Any

import pytest

from experiments import readme
from experiments.readme import BEGIN, END, README, RECORD, readme_block, with_block
from moe_ffn.errors import ConfigError
from moe_ffn.report.tables import flatten
from moe_ffn.runs.config import TrainConfig

LOSS_TOLERANCE = 2e-4
"""In nats: other processors round differently; bfloat16, or another model or optimizer, differs by more."""


@pytest.fixture
def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


def test_the_numbers_of_the_readme_are_those_of_this_code(record: dict[str, Any]) -> None:
    write_anew = "write them anew: make readme"
    options = flatten(TrainConfig().to_dict())

    assert readme_block(record) in README.read_text(encoding="utf-8"), write_anew
    assert {path: options[path] for path in record["options"]} == record["options"], write_anew
    losses = pytest.approx(record["first_losses"], abs=LOSS_TOLERANCE)
    assert readme.first_steps() == losses, write_anew


def test_the_block_is_put_between_its_comments_and_nothing_else_moves() -> None:
    before = f"# Title\n\n{BEGIN}old\n{END}\nThe rest.\n"
    block = f"{BEGIN}new\n{END}"
    assert with_block(before, block) == f"# Title\n\n{block}\nThe rest.\n"
    with pytest.raises(ConfigError, match="has no lines"):
        with_block("# Title\n", block)


def test_a_run_without_results_is_no_record() -> None:
    with pytest.raises(ConfigError, match="the run printed no results; run it by hand"):
        readme.results_of("error: no corpus")


def test_the_block_says_what_the_run_took(record: dict[str, Any]) -> None:
    record |= {"seconds": 195, "tokens_per_second": 8704, "num_threads": 2, "date": "May 2026"}
    record |= {"precision": "32-true", "versions": {"torch": "2.13.0+cpu"}, "screen": "loss 1"}
    assert readme_block(record) == (
        f"{BEGIN}```text\nloss 1\n```\n\nThat took 3 min 15 s on 2 CPU cores (8,704 tokens/s), in 32-true, "
        f"with torch 2.13.0, in May 2026.\n{END}"
    )
