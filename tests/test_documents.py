"""The documents that people and tools look for, and what the pages of explanation print."""

from __future__ import annotations

import json
import re
import runpy
import statistics
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

import moe_ffn

ROOT = Path(__file__).parents[1]


def test_the_citation_names_this_version_and_its_licence() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]

    assert (citation["cff-version"], citation["type"]) == ("1.2.0", "software")
    assert citation["message"]
    assert citation["title"] == project["name"]
    assert citation["version"] == project["version"] == moe_ffn.__version__
    assert citation["license"] == project["license"]
    names = ([author["name"] for author in of["authors"]] for of in (citation, project))
    assert next(names) == next(names)
    assert isinstance(citation["date-released"], date)


def test_the_changelog_begins_with_unreleased_and_lists_every_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", text, flags=re.MULTILINE)

    assert versions[0] == ("Unreleased", "")
    released = dict(versions[1:])
    assert moe_ffn.__version__ in released
    assert all(date.fromisoformat(day) for day in released.values())
    headings = set(re.findall(r"^### (.+)$", text, flags=re.MULTILINE))
    assert headings <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_contributing_names_files_that_there_are() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:moe_ffn|tests|docs|configs|experiments)/[\w/.]*)`", text)
    assert len(paths) > 8
    for path in paths:
        assert (ROOT / path).exists(), path


WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / ".github").glob("*.md")]


@pytest.mark.parametrize(
    "path", [*WORKFLOWS, *PAGES, ROOT / ".ci" / "run"], ids=lambda path: path.name
)
def test_the_makefile_has_every_target_that_a_file_names(path: Path) -> None:
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    named = re.findall(
        r"(?:`|^|run: |exec |&& )make ([a-z-]+)(?:`|$| +#)",
        path.read_text(encoding="utf-8"),
        flags=re.MULTILINE,
    )
    assert set(named) <= set(targets)
    assert named or path not in WORKFLOWS


def test_the_table_of_pruned_experts_has_the_recorded_losses() -> None:
    text = (ROOT / "docs" / "howto" / "initialise.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "docs/howto/pruning.json").read_text(encoding="utf-8"))
    every = found["num_experts"]
    assert f"{found['loss']:.4f} with all {every} experts" in text
    for num_experts, by_method in found["losses"].items():
        *ones, draws = by_method.values()
        cells = [num_experts, f"{1 - int(num_experts) / every:.0%}", *(f"{x:.4f}" for (x,) in ones)]
        cells.append(f"{statistics.fmean(draws):.4f} ± {statistics.stdev(draws):.4f}")
        assert f"| {' | '.join(cells)} |\n" in text


EXPLANATION_FOLDER = ROOT / "docs" / "explanation"
README = (ROOT / "README.md").read_text(encoding="utf-8")
EXPLANATIONS = sorted(
    path.name for path in EXPLANATION_FOLDER.glob("*.md") if "```python" in path.read_text("utf-8")
)
BLOCKS = re.compile(r"^```python\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("name", EXPLANATIONS)
def test_a_page_prints_what_it_shows(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(ROOT)
    names: dict[str, Any] = {}
    for code, shown in BLOCKS.findall((EXPLANATION_FOLDER / name).read_text(encoding="utf-8")):
        exec(compile(code, name, "exec"), names)
        assert capsys.readouterr().out == shown, code


def test_the_figures_are_what_their_program_draws(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    runpy.run_path(str(EXPLANATION_FOLDER / "figures.py"))["draw"](tmp_path)

    drawn = {path.name: path.read_text(encoding="utf-8") for path in tmp_path.iterdir()}
    kept = {
        p.name: p.read_text(encoding="utf-8") for p in (EXPLANATION_FOLDER / "figures").iterdir()
    }
    assert drawn == kept
    pages = "".join(
        (EXPLANATION_FOLDER / name).read_text(encoding="utf-8") for name in EXPLANATIONS
    )
    pages += README + (ROOT / "docs/studies/ladder.md").read_text(encoding="utf-8")
    used = set(re.findall(r"\((?:(?:docs|\.\.)/explanation/)?(figures/\S+)\)", pages))
    assert {f"figures/{name}" for name in kept} == used
