"""The numbers of the README are those of the default run, and it is told when they no longer are."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import readme
from experiments.readme import BEGIN, END, README, RECORD, readme_block, stale, with_block
from moe_ffn.errors import ConfigError


@pytest.fixture
def record() -> dict[str, Any]:
    return json.loads(RECORD.read_text(encoding="utf-8"))


@pytest.fixture
def text() -> str:
    return README.read_text(encoding="utf-8")


@pytest.fixture
def as_recorded(monkeypatch: pytest.MonkeyPatch, record: dict[str, Any]) -> None:
    """The first steps give what they gave when the record was made."""
    given = (record["first_losses"], f"{record['screen']}\n\nResults in runs/x/")
    monkeypatch.setattr(readme, "first_steps", lambda: given)


def test_the_numbers_of_the_readme_are_those_of_this_code(
    record: dict[str, Any], text: str
) -> None:
    assert stale(record, text) == [], "write them anew: make readme"


@pytest.mark.usefixtures("as_recorded")
def test_nothing_changed_is_not_old(record: dict[str, Any], text: str) -> None:
    assert stale(record, text) == []


@pytest.mark.usefixtures("as_recorded")
def test_a_number_edited_by_hand_is_seen(record: dict[str, Any], text: str) -> None:
    loss = f"{record['validation_loss']:.4f}"
    assert loss in text
    assert stale(record, text.replace(loss, "1.2345")) == [
        "its block is not that of docs/default_run.json"
    ]


@pytest.mark.usefixtures("as_recorded")
def test_a_default_that_changed_makes_them_old(record: dict[str, Any], text: str) -> None:
    record["options"]["trainer.max_steps"] = 300
    assert stale(record, text) == ["trainer.max_steps was 300, and is 400"]


@pytest.mark.usefixtures("as_recorded")
def test_a_new_option_by_itself_does_not(record: dict[str, Any], text: str) -> None:
    del record["options"]["trainer.max_steps"]
    assert stale(record, text) == []


@pytest.mark.parametrize(("shift", "old"), [(1e-4, False), (1e-3, True), (-1e-3, True)])
def test_other_first_losses_make_them_old(
    record: dict[str, Any],
    text: str,
    monkeypatch: pytest.MonkeyPatch,
    shift: float,
    old: bool,
) -> None:
    *first, last = record["first_losses"]
    monkeypatch.setattr(
        readme,
        "first_steps",
        lambda: ([*first, last + shift], f"{record['screen']}\n\nResults in runs/x/"),
    )
    assert any("the first losses were" in change for change in stale(record, text)) == old


def test_lines_that_are_no_longer_printed_make_them_old(
    record: dict[str, Any], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    screen = record["screen"].replace("bits per byte", "bpb") + "\n\nResults in runs/x/"
    monkeypatch.setattr(readme, "first_steps", lambda: (record["first_losses"], screen))
    assert stale(record, text) == [
        "no line like 'validation loss # nats per token, # bits per byte' is printed any more"
    ]


@pytest.mark.usefixtures("as_recorded")
def test_check_ends_with_1_and_says_how_to_write_them(
    record: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert readme.main(["--check"]) == 0
    assert capsys.readouterr().err == ""
    record["options"]["seed"] = 7
    old = tmp_path / "default_run.json"
    old.write_text(json.dumps(record), encoding="utf-8")
    monkeypatch.setattr(readme, "RECORD", old)

    assert readme.main(["--check"]) == 1
    assert capsys.readouterr().err == (
        "README.md is old: seed was 7, and is 0; write it anew: make readme\n"
    )


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
