"""The committed pages of the studies are what the program makes of the committed results.

python -m tests.test_study_pages    # `make studies`: writes them, and the table in README.md, anew
"""

from __future__ import annotations

import re
from importlib.metadata import version
from pathlib import Path

import pytest

from moe_ffn.cli.study_page import main, require_planned
from moe_ffn.config.yaml_files import read_config
from moe_ffn.report.study_page import SUMMARY_FILE, study_page
from moe_ffn.runs.config import TrainConfig
from moe_ffn.studies.budget import Budget
from moe_ffn.studies.config import StudyConfig
from moe_ffn.studies.gather import gather

ROOT = Path(__file__).parents[1]
README = ROOT / "README.md"
PAGES = ROOT / "docs" / "studies"
STUDIES = [
    path
    for path in sorted((ROOT / "configs/studies").glob("*.yaml"))
    if (PAGES / path.stem).is_dir()
]
BEGIN, END = "<!-- written by `make studies` -->\n", "<!-- end of what `make studies` writes -->\n"
IDS = re.compile(r'(?:id|xlink:href|clip-path)="[^"]*"')
"""Hashes of what is drawn."""
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


def with_table(readme: str, table: str) -> str:
    """The README with the rows of all studies between its two comments, if it has them."""
    before, begin, rest = readme.partition(BEGIN)
    _, end, after = rest.partition(END)
    rows = "".join(line for line in table.splitlines(keepends=True) if line.startswith("|"))
    linked = re.sub(r"^\| \[(.+?)\]\(", r"| [\1](docs/studies/", rows, flags=re.MULTILINE)
    return f"{before}{begin}{linked}{end}{after}" if end else readme


def numbers(svg: str) -> list[float]:
    return [float(number) for number in NUMBER.findall(IDS.sub("", svg))]


@pytest.mark.parametrize("file", STUDIES, ids=lambda path: path.stem)
def test_a_page_is_what_the_program_makes_of_its_results(file: Path) -> None:
    write_anew = "write it anew: make studies"
    study = StudyConfig.read(file)
    found = gather([PAGES / study.name])
    require_planned(study, file, found)
    page = study_page(study, found.results, found.step_seconds)

    written = (PAGES / f"{study.name}.md").read_text(encoding="utf-8")
    # Other processors round differently, and a fit shows it.
    assert NUMBER.sub("#", written) == NUMBER.sub("#", page.markdown), write_anew
    assert numbers(written) == pytest.approx(numbers(page.markdown), rel=5e-3, abs=1e-4), write_anew
    assert page.summary in (PAGES / SUMMARY_FILE).read_text(encoding="utf-8"), write_anew
    if version("matplotlib") not in (ROOT / "requirements.lock").read_text(encoding="utf-8"):
        return  # another one draws otherwise
    for name in study.figures:
        # By less than is seen.
        assert numbers(page.figures[name]) == pytest.approx(
            numbers((PAGES / study.name / name).read_text(encoding="utf-8")), rel=1e-3, abs=0.05
        ), (name, write_anew)


def test_the_figures_that_pages_show_are_those_that_git_keeps() -> None:
    kept = re.findall(r"^!/docs/studies/(.+)$", (ROOT / ".gitignore").read_text(), re.MULTILINE)
    shown = [f"{file.stem}/{name}" for file in STUDIES for name in StudyConfig.read(file).figures]
    pages = "".join((PAGES / f"{file.stem}.md").read_text(encoding="utf-8") for file in STUDIES)
    assert 0 < len(kept) <= 3
    assert sorted(kept) == sorted(shown) == sorted(re.findall(r"!\[.*\]\((.+)\)", pages))


def computed(file: Path) -> str:
    """What the program says of a study, without what its author does."""
    study, page = StudyConfig.read(file), (PAGES / f"{file.stem}.md").read_text(encoding="utf-8")
    for text in (study.answer, study.published, study.question, study.would_change_our_mind):
        page = page.replace(text.strip(), "") if text.strip() else page
    return page


@pytest.mark.parametrize("file", STUDIES, ids=lambda path: path.stem)
def test_an_answer_gives_no_number_that_was_not_computed(file: Path) -> None:
    assert unfounded(StudyConfig.read(file).answer, computed(file)) == []


def test_the_flops_that_upcycling_begins_with_are_those_of_its_dense_model() -> None:
    dense = read_config(ROOT / "configs/small.yaml", TrainConfig)
    study = StudyConfig.read(ROOT / "configs/studies/upcycling.yaml")
    assert study.initial_flops == Budget.of(dense).training_flops


def test_the_readme_gives_no_number_that_its_studies_do_not() -> None:
    answers = README.read_text(encoding="utf-8").partition("**Which block?**")[2]
    lines = answers.partition("\n\n")[2].partition("\n\n")[0].split("\n- ")
    assert len(lines) == 5
    by_name = {file.stem: computed(file) for file in STUDIES}
    for line in lines:
        linked = re.findall(r"\(docs/studies/(\w+)\.md\)", line)
        assert linked, line
        assert unfounded(line, "\n".join(by_name[name] for name in linked)) == [], line


def test_a_number_that_nothing_rounds_to_is_seen() -> None:
    page = "| a | 3.4567 ±0.0123 | 1,254 (0.544) | 12.5% |"
    assert unfounded("ends at 3.46, in 0.54 of 1254.0 steps; 12.5 %, 12 %", page) == []
    assert unfounded("0.45 of it (arXiv:2402.07871), 13.5 %, 12.6 %", page) == [
        "0.45",
        "13.5",
        "12.6",
    ]


@pytest.mark.skipif(not STUDIES, reason="no study has been run")
def test_the_readme_shows_the_table_of_all_studies() -> None:
    readme = README.read_text(encoding="utf-8")
    table = (PAGES / SUMMARY_FILE).read_text(encoding="utf-8")
    assert with_table(readme, table) == readme, "write it anew: make studies"


def test_the_table_is_put_between_its_comments_and_its_links_lead_to_the_pages() -> None:
    table = "# Studies\n\n| study | found |\n|---|---|\n| [a](a.md) | [1, 2] |\n"
    expected = "| study | found |\n|---|---|\n| [a](docs/studies/a.md) | [1, 2] |\n"
    before = f"# Title\n\n{BEGIN}old\n{END}The rest.\n"
    assert with_table(before, table) == f"# Title\n\n{BEGIN}{expected}{END}The rest.\n"
    assert with_table("# Title\n", table) == "# Title\n"


if __name__ == "__main__":
    main([*map(str, STUDIES), "--output", str(PAGES)])
    summary = (PAGES / SUMMARY_FILE).read_text(encoding="utf-8")
    README.write_text(with_table(README.read_text(encoding="utf-8"), summary), encoding="utf-8")
