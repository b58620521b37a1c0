"""`moe-ffn inspect`: the page, and the messages for bad input."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser

import moe_ffn
from moe_ffn.report.inspect import figures, inspect_run, text_of_run
from tests.helpers.browser import PHONE, opened
from tests.helpers.tiny_runs import cli

RunTrain = Callable[..., Any]
inspect = cli("inspect", columns=80)


@pytest.fixture(scope="module")
def page(moe_run: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of a copied run, next to the output of the program."""
    own = Path(shutil.copytree(moe_run.folder, tmp_path_factory.mktemp("pages") / "moe"))
    code, out, err = inspect(own, "--tokens", "200")
    assert (code, err) == (0, "")
    (own / "said.txt").write_text(out)
    return own / "inspect.html"


def text_of(page: Path) -> str:
    html = page.read_text()
    body = html[html.index("<body>") : html.index('<script type="application')]
    return re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)))


def test_the_page_of_a_mixture_of_experts(page: Path) -> None:
    own = page.parent
    out = (own / "said.txt").read_text()

    assert out.endswith(f"written: {own}/inspect.html\n")
    assert "of the first choice, above chance" in out.replace("\n", "")
    assert max(map(len, out.splitlines())) <= max(80, len(str(own)) + 30)
    shown = text_of(page)
    assert "moe in layer 0, 1" in shown
    assert "No syntax classes: the corpus is not known to be Python source." in shown
    run = moe_ffn.load_run(own)
    for router in inspect_run(run, text_of_run(run, 200)).routers.values():
        share = router.agreement["token"].share
        assert (f"{share:.0%} (" if share >= 0.1 else f"{share:.1%} (") in shown


def test_figures_and_numbers_in_a_notebook(moe_run: Any) -> None:
    run = moe_ffn.load_run(moe_run.folder)
    found = inspect_run(run, text_of_run(run, num_tokens=200), layers=[1])

    assert list(found.routers) == ["layer_01"]
    assert [units.layer for units in found.units] == [1]
    by_class: Any = figures.taken(found, "layer_01", "byte class")
    assert by_class.layout.meta["title"] == "By byte class"
    with pytest.raises(LookupError, match="there is no attribute 'token'; there are byte class"):
        figures.taken(found, "layer_01", "token")


def test_a_custom_python_text_has_syntax_classes(moe_run: Any) -> None:
    Path("mine.py").write_text("def f(x):\n    return x  # the cat\n" * 30)

    code, _, _ = inspect(moe_run.folder, "--text", "mine.py", "--output", "page.html")

    shown = text_of(Path("page.html"))
    assert code == 0
    assert "of mine.py, 1 document" in shown
    assert "syntax class" in shown
    assert not (moe_run.folder / "inspect.html").exists()


BLOCKS = {
    "conv": ["--model.ffn", "{type: conv, d_ff: 24}"],
    "shared": ["--model.ffn", "{type: moe, num_experts: 4, shared_expert: dense, router: {type: hash}}"],
    "soft": [
        *("--model.ffn", "soft_moe", "--model.causal", "false"),
        *("--model.ffn_at", "{'1': {type: identity}}"),
    ],
}  # fmt: skip


@pytest.mark.parametrize("name", ["dense", "depths", *BLOCKS])
def test_every_kind_of_block_has_a_page(
    name: str, short_run: Callable[..., Path], request: pytest.FixtureRequest
) -> None:
    if name in BLOCKS:
        run = short_run(*BLOCKS[name])
    else:
        run = request.getfixturevalue(f"{name}_run")

    code, out, err = inspect(run, "--tokens", "300", "--output", "page.html")

    assert (code, err) == (0, "")
    shown = text_of(Path("page.html"))
    if name == "soft":
        assert (
            shown.count("is not shown: it has no network whose hidden units see single tokens") == 2
        )
        assert "Layer 0 (soft_moe)" in " ".join(out.split())
        assert "Layer 1 (identity)" in " ".join(out.split())
    else:
        assert "What units store" in shown
        assert "is not shown" not in shown
    assert ("Tokens of each expert" in shown) == (name in ("shared", "depths"))
    if name == "shared":
        assert "shared expert, unit" in shown


def test_the_page_in_a_browser(browser: Browser, page: Path) -> None:
    """Opened once, on a desktop, then as narrow as a phone and in the dark."""
    with opened(browser, page) as found:
        found.page.wait_for_selector("html[data-drawn]")
        folded = found.page.locator("details:not([open]) > summary")
        folded.evaluate_all("all => all.forEach(summary => summary.click())")
        found.page.wait_for_function(
            "[...document.querySelectorAll('.plot')].every(p => p.querySelector('svg.main-svg'))"
        )

        assert found.overflow == 0
        assert found.page.locator(".plot").count() >= 5
        assert found.page.query_selector_all(".taken code")
        found.keep("inspect")
        found.page.select_option("select >> nth=0", "1")
        found.page.emulate_media(color_scheme="dark")
        found.page.set_viewport_size({"width": PHONE, "height": 900})
        found.page.wait_for_timeout(200)
        assert found.overflow == 0
        found.keep("inspect-phone")
        assert found.errors == []


# -- what is rejected


def test_a_changed_or_missing_corpus_is_an_error(
    corpus: Path, run_train: RunTrain, tmp_path: Path
) -> None:
    mine = Path(shutil.copytree(corpus, tmp_path / "corpus"))
    paths = ["--data.corpus.paths", f"['{mine}']"]
    run = run_train(tmp_path, "--trainer.max_steps", "1", *paths)

    (mine / "3.txt").write_text("another text\n")
    said = (
        f"error: data.corpus: '3.txt' has changed, since '{run.folder}' began; restore it, or "
        "give a text with --text\n"
    )
    assert inspect(run.folder) == (2, "", said)
    shutil.rmtree(mine)
    said = (
        f"error: data.corpus.paths: '{mine}' does not exist, or is a broken link (looked "
        f"in '{tmp_path}'); check the spelling; or give a text with --text\n"
    )
    assert inspect(run.folder) == (2, "", said)

    Path("own.txt").write_text("the cat sat on a mat\n" * 20)
    assert inspect(run.folder, "--text", "own.txt")[0] == 0
