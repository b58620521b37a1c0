"""The committed pages of the studies are what the program makes of the committed results.

python -m tests.test_study_pages    # `make studies`: writes pages and pictures
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from urllib.parse import unquote

import pytest
from playwright.sync_api import Browser

from moe_ffn.cli.study_page import main, require_planned
from moe_ffn.config.yaml_files import read_config
from moe_ffn.report.plots import figures_page
from moe_ffn.report.studies.leaderboard import leaderboard
from moe_ffn.report.studies.study_page import SUMMARY_FILE, StudyPage, study_page
from moe_ffn.runs.budget import Budget
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies.config import STUDY_FILE, StudyConfig
from moe_ffn.studies.gather import gather
from tests.helpers.browser import chromium, opened

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = ROOT / "docs" / "studies"
LEADERBOARD = ROOT / "docs" / "leaderboard.md"
STUDIES = [
    path
    for path in sorted((ROOT / "configs/studies").glob("*.yaml"))
    if (PAGES / path.stem).is_dir()
]
DRAWN = re.compile(r'class="js-line"[^>]* d="([^"]*)"|class="point"[^>]* transform="([^"]*)"')
"""Lines and points of an SVG that plotly drew."""
WIDTH = 760
"""Pixels of a picture."""
IN_THE_DARK = (
    "<style>@media (prefers-color-scheme: dark) "
    "{ svg { filter: invert(0.92) hue-rotate(180deg) } }</style>"
)
"""Swaps light and dark, and keeps hues, where a picture is shown in the dark."""
NUMBER = re.compile(r"-?\d+\.?\d*(?:e[+-]\d+)?")


SAID = re.compile(r"(?<![\w.:])(\d+\.(\d+)|\d+(?= %))(?![\w.]*\d)")
"""A number that a sentence gives to some digits, or in percent; not that of a paper, 2402.07871."""


def unfounded(text: str, computed: str) -> list[str]:
    """The numbers of a text that no computed one rounds to."""
    known = [
        abs(float(number.replace(",", ""))) for number in re.findall(r"\d[\d,]*\.?\d*", computed)
    ]
    found = [(match[1], len(match[2] or "")) for match in SAID.finditer(text)]
    return [
        said
        for said, digits in found
        if not any(abs(value - float(said)) <= 0.5001 * 10**-digits for value in known)
    ]


def numbers(text: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(text)]


@cache
def page_of(file: Path) -> StudyPage:
    study = StudyConfig.read(file)
    found = gather([PAGES / study.name])
    require_planned(study, file, found)
    return study_page(study, found.results, found.step_seconds)


def drawn(browser: Browser, folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the file of each picture that a page shows, and what plotly draws for it as SVG."""
    pages = [page_of(file) for file in STUDIES if StudyConfig.read(file).figures]
    figures = [
        (PAGES / page.name / name, page.figures[Path(name).stem])
        for page in pages
        for name in page.pictures
    ]
    (folder / "one.html").write_text(figures_page("one", [figures[0][1]]), encoding="utf-8")
    with opened(browser, folder / "one.html") as found:
        for path, figure in figures:
            size = {"format": "svg", "width": WIDTH, "height": figure.layout.height}
            given = [json.loads(figure.to_json()), size]
            given[0]["layout"].pop("title")  # the page says it
            url = found.page.evaluate("([figure, size]) => Plotly.toImage(figure, size)", given)
            opening, _, drawing = unquote(url.partition(",")[2]).partition(">")
            yield path, f"{opening}>{IN_THE_DARK}{drawing}"


def write_pictures() -> None:
    """Draw the figures that pages show."""
    with TemporaryDirectory() as folder, chromium() as browser:
        for path, svg in drawn(browser, Path(folder)):
            path.write_text(f"{svg}\n", encoding="utf-8")


LIKE_OTHERS = {
    *("ablation", "balance", "distillation", "first_run", "gating", "granularity", "leverage_wide"),
    *("optimizer", "routers", "transfer"),
}
"""Studies whose pages have no part that those of other studies have not."""


@pytest.mark.parametrize(
    "file",
    [
        pytest.param(file, id=file.stem, marks=[pytest.mark.slow] * (file.stem in LIKE_OTHERS))
        for file in STUDIES
    ],
)
def test_a_page_is_what_the_program_makes_of_its_results(file: Path) -> None:
    page = page_of(file)

    require_same((PAGES / f"{page.name}.md").read_text(encoding="utf-8"), page.markdown)
    assert page.summary in (PAGES / SUMMARY_FILE).read_text(encoding="utf-8")


@pytest.mark.parametrize("file", STUDIES, ids=[file.stem for file in STUDIES])
def test_the_study_next_to_its_results_is_the_committed_one(file: Path) -> None:
    copy = StudyConfig.read(PAGES / file.stem / STUDY_FILE)
    assert copy.model_copy(update={"overrides": {}}) == StudyConfig.read(file)


def require_same(written: str, made: str) -> None:
    """Compare two pages; other processors round differently, and a fit shows it."""
    write_anew = "write it anew: make studies"
    assert NUMBER.sub("#", written) == NUMBER.sub("#", made), write_anew
    assert numbers(written) == pytest.approx(numbers(made), rel=5e-3, abs=1e-4), write_anew


def test_the_leaderboard_is_what_the_program_makes_of_the_results_of_all_studies() -> None:
    written = LEADERBOARD.read_text(encoding="utf-8")

    require_same(written, leaderboard(PAGES))
    cells = [cell for line in written.splitlines() if line[:1] == "|" for cell in line.split("|")]
    assert max(map(len, cells)) <= 200


@pytest.mark.skipif(
    f"plotly=={version('plotly')}" not in (ROOT / "requirements.lock").read_text(encoding="utf-8"),
    reason="another version of plotly draws otherwise",
)
def test_pictures_are_what_chromium_draws_of_the_results(browser: Browser, tmp_path: Path) -> None:
    for path, svg in drawn(browser, tmp_path):
        kept = path.read_text(encoding="utf-8")
        ours, theirs = (numbers(str(DRAWN.findall(text))) for text in (kept, svg))
        assert len(ours) > 20
        assert IN_THE_DARK in kept
        # Differences that nobody sees.
        assert ours == pytest.approx(theirs, rel=1e-2, abs=2), "write it anew: make studies"


def test_the_pictures_that_pages_show_are_those_that_git_keeps() -> None:
    kept = [path.relative_to(PAGES).as_posix() for path in PAGES.rglob("*.svg")]
    shown = [f"{file.stem}/{name}" for file in STUDIES for name in StudyConfig.read(file).figures]
    pages = "".join((PAGES / f"{file.stem}.md").read_text(encoding="utf-8") for file in STUDIES)
    assert 0 < len(kept) <= 3
    assert sorted(kept) == sorted(shown) == sorted(re.findall(r"!\[.*\]\(([^.].+)\)", pages))


def computed(file: Path) -> str:
    """The computed part of a study's page, without its author's text."""
    study, page = StudyConfig.read(file), (PAGES / f"{file.stem}.md").read_text(encoding="utf-8")
    texts = (study.answer, study.published, study.question, study.would_change_our_mind)
    for paragraph in filter(None, (line.strip() for text in texts for line in text.splitlines())):
        page = page.replace(paragraph, "")
    return page


@pytest.mark.parametrize("file", STUDIES, ids=lambda path: path.stem)
def test_an_answer_gives_no_number_that_was_not_computed(file: Path) -> None:
    assert unfounded(StudyConfig.read(file).answer, computed(file)) == []


def test_the_flops_that_upcycling_begins_with_are_those_of_its_dense_model() -> None:
    dense = read_config(ROOT / "configs/small.yaml", TrainConfig)
    study = StudyConfig.read(ROOT / "configs/studies/upcycling.yaml")
    assert study.initial_flops == Budget.of(dense).training_flops


def what_we_found() -> str:
    """Return that section of the README."""
    section = README.read_text(encoding="utf-8").partition("## What we found")[2]
    return section.partition("\n## ")[0]


def test_the_readme_gives_no_number_that_its_studies_do_not() -> None:
    lines = re.findall(r"^\|.*\]\(docs/.*", what_we_found(), re.MULTILINE)
    assert len(lines) == 7
    by_name = {file.stem: computed(file) for file in STUDIES}
    by_name["leaderboard"] = LEADERBOARD.read_text(encoding="utf-8")
    for line in lines:
        linked = re.findall(r"\(docs/(?:studies/)?(\w+)\.md\)", line)
        assert linked, line
        assert unfounded(line, "\n".join(by_name[name] for name in linked)) == [], line


def counts(text: str) -> set[tuple[str, str]]:
    """Return the numbers of each `10 of 17` and `3 of the 9`."""
    return set(re.findall(r"\b(\d+) of (?:the )?(\d+)\b", " ".join(text.split())))


def test_the_counts_in_the_readme_are_those_of_the_leaderboard_and_of_ladder() -> None:
    """Budgets won, and runs that beat a 5-gram model."""
    given = counts(what_we_found())
    assert len(given) == 3
    pages = (LEADERBOARD, PAGES / "ladder.md")
    assert given <= set().union(*(counts(page.read_text(encoding="utf-8")) for page in pages))


def test_a_number_that_nothing_rounds_to_is_seen() -> None:
    page = "| a | 3.4567 ±0.0123 | 1,254 (0.544) | 12.5% |"
    assert unfounded("ends at 3.46, in 0.54 of 1254.0 steps; 12.5 %, 12 %", page) == []
    assert unfounded("0.45 of it (arXiv:2402.07871), 13.5 %, 12.6 %", page) == [
        "0.45",
        "13.5",
        "12.6",
    ]


if __name__ == "__main__":
    main([*map(str, STUDIES), "--output", str(PAGES), "--leaderboard", str(LEADERBOARD)])
    write_pictures()
