"""The pages of docs/explanation: their Python runs and prints what they show; their figures are current."""

from __future__ import annotations

import re
import runpy
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs" / "explanation"
README = (ROOT / "README.md").read_text(encoding="utf-8")
PAGES = sorted(path.name for path in FOLDER.glob("*.md") if "```python" in path.read_text("utf-8"))
BLOCKS = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", PAGES)
def test_a_page_prints_what_it_shows(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    for code, shown in BLOCKS.findall((FOLDER / name).read_text(encoding="utf-8")):
        exec(compile(code, name, "exec"), names)
        assert capsys.readouterr().out == shown, code


def test_the_figures_are_what_their_program_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(FOLDER / "figures.py"))["draw"](tmp_path)

    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    kept = {p.name: p.read_text(encoding="utf-8") for p in (FOLDER / "figures").iterdir()}
    assert drawn == kept
    pages = "".join((FOLDER / name).read_text(encoding="utf-8") for name in PAGES)
    used = set(re.findall(r"\((?:docs/explanation/)?(figures/\S+)\)", pages + README))
    assert {f"figures/{name}" for name in kept} == used
