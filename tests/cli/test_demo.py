"""`moe-ffn demo`: the trace of a text by the model that the package ships."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from moe_ffn.cli.demo import MODEL, TEXT
from moe_ffn.report.trace import visible
from moe_ffn.weights.pretrained import load_pretrained, load_tokenizer
from tests.helpers.browser import PHONE, opened
from tests.helpers.tiny_runs import run_here

PROGRAM = "moe_ffn.cli.demo"


def test_every_token_is_named_and_the_page_opens(tmp_path: Path, browser: Browser) -> None:
    done = run_here(program=PROGRAM)

    assert (done.code, done.stderr) == (0, "")
    tokenizer = load_tokenizer(MODEL)
    for token_id in tokenizer.encode(TEXT).tolist():
        assert visible(tokenizer.token_bytes[token_id]) in done.stdout
    assert done.stdout.count("moe-ffn") == 4
    with opened(browser, tmp_path / "demo.html", width=PHONE) as page:
        assert (page.errors, page.overflow) == ([], 0)
        assert page.page.locator(".trace tbody tr").count() == len(tokenizer.encode(TEXT))


@pytest.mark.parametrize("text", ["", "  \n "])
def test_a_text_without_characters_is_one_sentence(text: str, tmp_path: Path) -> None:
    done = run_here("--text", text, program=PROGRAM)

    assert (done.code, done.stderr.count("\n")) == (2, 1)
    assert done.stderr.startswith("error: --text: ")
    assert not (tmp_path / "demo.html").exists()


def test_another_file_is_not_replaced(tmp_path: Path) -> None:
    (tmp_path / "demo.html").write_text("mine")
    done = run_here(program=PROGRAM)

    assert (done.code, (tmp_path / "demo.html").read_text()) == (2, "mine")
    assert "was not made by this program" in done.stderr


def test_a_folder_that_cannot_be_written_is_one_sentence() -> None:
    done = run_here("--output", "/proc/demo.html", program=PROGRAM)  # root writes anywhere else

    assert (done.code, done.stderr.count("\n")) == (2, 1)
    assert "--output: '/proc/demo.html' cannot be written" in done.stderr


def test_the_card_names_the_model_that_is_shipped() -> None:
    card = (MODEL / "README.md").read_text(encoding="utf-8")
    decoder = load_pretrained(MODEL)
    count = sum(weights.numel() for weights in decoder.parameters())
    vocab_size = json.loads((MODEL / "config.json").read_text())["vocab_size"]

    assert f"{count:,} parameters" in card
    assert f"{vocab_size:,} tokens" in card
    assert re.search(r"validation loss of \d\.\d{3}", card)
    assert sum(os.path.getsize(path) for path in MODEL.iterdir()) < 2_000_000  # noqa: PTH202
