"""The notebooks of docs/notebooks: they run from top to bottom, and are committed with outputs."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import moe_ffn
from moe_ffn.config.option_tree import merge

DOCS = Path(__file__).parents[1] / "docs"
PATHS = sorted((DOCS / "notebooks").glob("*.ipynb"))

sys.path.append(str(DOCS / "_ext"))
from notebooks import LONG, Ran, as_markdown, html_of, outputs_of, run_notebook  # noqa: E402


def book_of(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8"))


def kinds(outputs: list[dict[str, Any]]) -> list[list[str]]:
    """Kinds of output that a code host shows of a cell: printed text, pictures and values."""
    return [[output["output_type"], *sorted(output.get("data", {}))] for output in outputs]


def check_which_block(names: dict[str, Any], cells: list[Ran]) -> None:
    assert {arm.name for arm in names["comparison"].arms} == {"dense", "swiglu", "moe"}


def check_inside_moe(names: dict[str, Any], cells: list[Ran]) -> None:
    printed = "".join(cell.printed for cell in cells)
    assert "largest difference: 0" in printed or re.search(r"difference: \S+e-0[678]", printed)
    own, replayed = (float(value) for value in re.findall(r"^[a-z ]+  (\d\.\d+)$", printed, re.M))
    assert replayed < own


def check_write_a_router(names: dict[str, Any], cells: list[Ran]) -> None:
    assert names["routed"].layers["layer_01"].num_experts == 8


CHECKS: dict[str, Callable[[dict[str, Any], list[Ran]], None]] = {
    "which_block": check_which_block,
    "inside_moe": check_inside_moe,
    "write_a_router": check_write_a_router,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all notebooks, as in Jupyter; they share the prepared corpus."""
    return tmp_path_factory.mktemp("notebooks")


@pytest.mark.parametrize("is_whole", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_shows_every_value(
    path: Path, is_whole: bool, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Full-length runs also support the notebook's claims; others have four steps on a small text."""
    monkeypatch.chdir(folder)
    if not is_whole:
        corpus = {"type": "text", "paths": [str(DOCS / "howto/backend.md")]}
        few: dict[str, Any] = {
            "trainer": {"max_steps": 4},
            "data": {"corpus": corpus, "validation_tokens": 1024},
            "logging": {"wandb": {"mode": "disabled"}},
            "sample": {"num_tokens": 4},
        }
        train = moe_ffn.train
        monkeypatch.setattr(moe_ffn, "train", lambda given: train(merge(given, few)))
    names: dict[str, Any] = {}
    cells = list(run_notebook(path, names))
    shown_now = [kinds(outputs_of(cell, 1, lambda html: b"")) for cell in cells]
    shown_on_a_host = [kinds(cell.get("outputs", [])) for cell in book_of(path)["cells"]]
    assert shown_on_a_host == shown_now, "`make pictures` stores the outputs"
    CHECKS[path.stem](names, cells)
    if is_whole:
        runs = [*names.get("runs", {}).values(), *([names["run"]] if "run" in names else [])]
        assert all(run.summary.validation_loss < run.summary.unigram_loss for run in runs)
    shown = [html_of(cell.value) for cell in cells if cell.value is not None]
    assert len(shown) >= 3
    assert not any("object at 0x" in html for html in shown)


@pytest.mark.parametrize("path", PATHS, ids=lambda path: path.stem)
def test_a_notebook_is_committed_as_jupyter_saves_it_with_small_outputs(path: Path) -> None:
    text, book = path.read_text(encoding="utf-8"), book_of(path)
    assert text == json.dumps(book, indent=1, ensure_ascii=False, sort_keys=True) + "\n"
    assert len(text) < 250_000
    assert (book["nbformat"], book["nbformat_minor"]) == (4, 5)
    cells = book["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert all(re.fullmatch(r"[a-zA-Z0-9_-]{1,64}", cell["id"]) for cell in cells)
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    for output in (output for cell in code for output in cell["outputs"]):
        printed = "".join([*output.get("text", []), *output.get("data", {}).get("text/plain", [])])
        assert len(printed.splitlines()) <= LONG
        assert not re.search(r"(?<![\w.])/\w+/|object at 0x", printed), "no paths of a machine"
    for target in re.findall(r"\]\((?!https?:)([^)#\s]+)\)", text):
        assert (path.parent / target).exists(), target


def test_a_page_has_code_outputs_and_figures(tmp_path: Path) -> None:
    path = tmp_path / "small.ipynb"

    def write(*cells: tuple[str, str]) -> None:
        found = [{"cell_type": kind, "source": source} for kind, source in cells]
        path.write_text(json.dumps({"cells": found}), encoding="utf-8")

    figure = ("code", "import plotly.graph_objects as go\ngo.Figure()")
    long = ("code", "for n in range(30):\n    print(n)")
    write(("markdown", "# A <title>"), ("code", "print('<b>')\n7"), long, figure)

    page = as_markdown(path)

    assert page.startswith("# A <title>\n\n```python\nprint('<b>')\n7\n```\n\n")
    assert "<pre>&lt;b&gt;</pre><pre>7</pre>" in page
    assert "<details><summary>30 lines of output</summary><pre>0\n1\n" in page
    assert page.index('src="../_static/plotly.js"') < page.index("Plotly.newPlot")
    write(("code", "1 / 0"))
    with pytest.raises(ZeroDivisionError):
        as_markdown(path)
