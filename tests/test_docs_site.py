"""The pages of docs/: code runs, links and option names exist, pages are short, and the site builds."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import moe_ffn
from moe_ffn.cli.__main__ import PROGRAMS, run
from moe_ffn.config.errors import ConfigError
from moe_ffn.config.option_tree import Option, members_of, merge, option_tree
from moe_ffn.runs.config import TrainConfig
from tests.helpers.tiny_runs import ForkedTraining

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
sys.path.append(str(DOCS / "_ext"))
from generated import with_counts, with_generated_parts  # noqa: E402

PAGES = {path.relative_to(ROOT).as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
WRITTEN = [name for name in PAGES if not name.startswith("docs/studies/")]
"""Pages that a person writes; programs write those of the studies."""

TINY = [
    *("--data.cache_dir", "cache", "--data.seq_len", "16", "--data.validation_tokens", "160"),
    *("--trainer.max_steps", "2", "--trainer.accelerator", "cpu"),
    *("--logging.wandb.mode", "disabled", "--sample.num_tokens", "4"),
]
TEXT = ["--data.corpus", "{type: text, paths: [text.txt]}"]


def blocks_of(text: str) -> list[tuple[str, str]]:
    """Language and code of each block, without those of directives."""
    return re.findall(r"^```(\w+)\n(.*?)^```", text, flags=re.DOTALL | re.MULTILINE)


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)


# -- code


@pytest.fixture
def newcomer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder, but for a small corpus."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))  # of a sweep, which trains in another process
    train, short = (
        moe_ffn.train,
        {"sample": {"num_tokens": 4}, "logging": {"wandb": {"mode": "disabled"}}},
    )
    monkeypatch.setattr(moe_ffn, "train", lambda given: train(merge(given, short)))
    Path("text.txt").write_text("def f(x):\n    return x\nthe cat sat on a mat\n" * 80)


def check_own_model(names: dict[str, Any], printed: str) -> None:
    assert names["counting"][-1] < 0.7 * names["counting"][0], "the model learns"
    assert names["load_E"].sum() == 2 * 16 * 16, "two experts of each token"
    assert "pairs of each expert: [" in printed
    assert [*names["row"][0]][:2] == ["load", "max_violation"]
    half_dense = names["Model"](["swiglu", names["MOE"]])
    assert len(half_dense(names["token_ids"])[1]) == 1, "only one layer has a routing"


def check_reading(names: dict[str, Any], printed: str) -> None:
    assert "layer 0" in printed
    assert names["first_layer"].num_experts == 8
    assert len(names["losses"]) > 0
    assert len(names["new_ids"]) == 32
    assert names["text"].startswith("def ")


def check_router(names: dict[str, Any], printed: str) -> None:
    assert "MaxVio" in printed
    assert re.search(r"^cosine +1 ", printed, re.MULTILINE), "an arm with one seed"
    assert names["output"].routing.num_experts == 8


CHECKS: dict[str, Callable[[dict[str, Any], str], None]] = {
    "own_model": check_own_model,
    "reading_a_run": check_reading,
    "own_router": check_router,
}


@pytest.mark.usefixtures("newcomer")
@pytest.mark.parametrize(
    "tutorial", [path.stem for path in (DOCS / "tutorials").glob("*.md") if path.stem != "index"]
)
def test_a_tutorial_runs_from_its_beginning_to_its_end(
    tutorial: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that begin with the name of a file are written there; commands get options of a short run."""
    monkeypatch.setattr("moe_ffn.studies.sweep.Popen", ForkedTraining)
    text = (DOCS / "tutorials" / f"{tutorial}.md").read_text(encoding="utf-8")
    names: dict[str, Any] = {}
    printed = ""
    tiny = TINY if tutorial == "own_corpus" else [*TINY, *TEXT]
    for language, block in blocks_of(text):
        named = re.match(r"# (\S+\.\w+)\n", block)
        if named is not None:
            Path(named[1]).write_text(block, encoding="utf-8")
        elif language == "python":
            exec(compile(block, tutorial, "exec"), names)
        elif language == "bash":
            for line in block.splitlines():
                command, *argv = shlex.split(line, comments=True)
                assert command == "moe-ffn"
                one_seed = ["--seeds", "0"] if argv[0] == "sweep" else []
                short = [*tiny, *one_seed] if argv[0] in ("train", "sweep") else []
                assert run([*argv, *short]) == 0, line
        printed += capsys.readouterr().out
    CHECKS.get(tutorial, lambda names, printed: None)(names, printed)


@pytest.mark.parametrize(
    ("tutorial", "right", "wrong"),
    [
        ("custom_ffn", "return 2 * d_model * self.rank", "return d_model * self.rank"),
        ("own_router", "def num_params(", "def uncounted("),
    ],
)
def test_a_tutorial_quotes_the_message_of_a_failed_check(
    tutorial: str, right: str, wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    text = (DOCS / "tutorials" / f"{tutorial}.md").read_text(encoding="utf-8")
    part, check, *_ = [block for language, block in blocks_of(text) if language == "python"]
    Path(part.split()[1]).write_text(part.replace(right, wrong), encoding="utf-8")
    with pytest.raises(ConfigError) as failed:
        exec(compile(check, tutorial, "exec"), {})
    assert f"ConfigError: {failed.value}" in " ".join(text.split())


API = sorted((DOCS / "reference").glob("api_*.md"))


def test_every_public_name_has_an_example() -> None:
    sections = [
        part for path in API for part in path.read_text(encoding="utf-8").split("\n## ")[1:]
    ]
    shown = [part.partition("\n")[0] for part in sections if "```python\n" in part]
    assert sorted(shown) == sorted(moe_ffn.__all__)
    for part in sections:
        name, _, text = part.partition("\n")
        assert name not in shown or re.search(rf"\b{name}\b", text.partition("```python")[2]), name


@pytest.mark.usefixtures("newcomer")
@pytest.mark.parametrize("page", ["blocks", "routers", "values", "models"])
def test_the_examples_of_the_reference_run(page: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every example runs independently."""
    text = (DOCS / "reference" / f"api_{page}.md").read_text(encoding="utf-8")
    if "runs/my-run" in text:
        assert run(["train", *TINY, *TEXT, "--run.name", "my-run", "--model.d_model", "16"]) == 0
    for language, block in blocks_of(text):
        assert language == "python"
        exec(compile(block, page, "exec"), {})
    if page == "blocks":
        assert "num_expert: unknown; did you mean 'num_experts'?" in capsys.readouterr().out


# -- text


def slugs(text: str) -> set[str]:
    """Anchors of a page, as a code host makes them."""
    headings = re.findall(r"^#+ (.*)$", without_code(text), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", h.strip().lower()).replace(" ", "-") for h in headings}


@pytest.mark.parametrize("name", [*PAGES, "README.md", "CONTRIBUTING.md"])
def test_every_link_leads_somewhere(name: str) -> None:
    page = ROOT / name
    for target in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
        path, _, anchor = target.partition("#")
        if re.match(r"[a-z]+:", path):
            continue
        found = (page.parent / path).resolve() if path else page
        assert found.exists(), target
        if anchor:
            assert anchor in slugs(found.read_text(encoding="utf-8")), target


@cache
def known_options() -> set[str]:
    """`a.b.c`, `b.c` and `c` of all dotted paths of all types, as far as blocks nest once."""
    paths: set[str] = set()

    def walk(option: Option, depth: int) -> None:
        paths.add(option.path)
        if depth == 0:
            return
        below = option.switched_on().children()
        if option.family is not None:
            below = [child for m in members_of(option.family) for child in option.options_of(m)]
        for child in below:
            walk(child, depth - 1)

    walk(option_tree(TrainConfig, TrainConfig().to_dict()), 6)
    return {
        ".".join(path.split(".")[start:]) for path in paths for start in range(path.count(".") + 1)
    }


DOTTED = re.compile(r"`(?:--)?([a-z]\w*(?:\.[a-z]\w*)+)(?:`|[: ][^`]*`)")
OTHER = re.compile(
    r"\.(?:cpp|html|jsonl?|md|py|safetensors|txt|yaml)$|^run\.(?:config|facts|model|rows|samples|summary|tokenizer)|^run\.alarms"
)
"""Files, and attributes of a run in Python."""


@pytest.mark.parametrize("name", WRITTEN)
def test_every_option_named_in_a_page_exists(name: str) -> None:
    text = without_code(PAGES[name].read_text(encoding="utf-8"))
    known = known_options()
    sections = {path.partition(".")[0] for path in known if "." in path}
    for path in DOTTED.findall(text):
        is_option = path.partition(".")[0] in sections and not OTHER.search(path)
        assert not is_option or path in known, path


@pytest.mark.parametrize("name", WRITTEN)
def test_a_page_is_short(name: str) -> None:
    assert len(PAGES[name].read_text(encoding="utf-8").splitlines()) <= 250


COUNTED = re.compile(r"\d+(?=\s\[(?:blocks|routers)\]|, with expert choice|, with `forced`)")
"""Numbers of blocks and routers."""

GENERATED = [name for name in WRITTEN if "<!-- generated: " in PAGES[name].read_text("utf-8")]


@pytest.mark.parametrize("name", GENERATED)
def test_the_tables_in_a_page_are_those_of_the_code(name: str) -> None:
    text = PAGES[name].read_text(encoding="utf-8")
    assert text.count("<!-- generated: ") == text.count("<!-- end -->")
    assert with_generated_parts(text) == text, "`python docs/_ext/generated.py` writes the tables"


@pytest.mark.parametrize(("page", "counts"), [("README.md", 3), ("docs/reference/libraries.md", 3)])
def test_counts_of_blocks_and_routers_are_those_of_the_code(page: str, counts: int) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    wrong, found = COUNTED.subn("99", text)
    assert found == counts
    assert with_counts(wrong) == text, "`python docs/_ext/generated.py` writes the counts"


def test_the_arguments_of_each_program_are_listed_once() -> None:
    text = "".join(PAGES[name].read_text("utf-8") for name in GENERATED)
    listed = re.findall(r"^## moe-ffn (\w+)$", text, re.MULTILINE)
    assert sorted(listed) == sorted(PROGRAMS)


def test_the_front_page_lists_every_page() -> None:
    listed = re.findall(
        r"^\| \[.*\]\((\S+)\) \| ", PAGES["docs/README.md"].read_text("utf-8"), re.M
    )
    pages = [path for path in DOCS.rglob("*.*") if path.suffix in (".md", ".ipynb")]
    found = [path.relative_to(DOCS).as_posix() for path in pages]
    introductions = ("README", "index")
    assert sorted(listed) == sorted(n for n in found if Path(n).stem not in introductions)


# -- the site


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    """The command of `make docs`, without network."""
    asked = subprocess.run(
        ["make", "--dry-run", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (options,) = re.findall(r"-m sphinx (.*) docs build/docs$", asked.stdout, flags=re.MULTILINE)
    assert "-W" in options.split()
    command = [sys.executable, "-m", "sphinx", *options.split(), str(DOCS), str(tmp_path)]
    subprocess.run(command, cwd=ROOT, check=True)

    def page(name: str) -> str:
        return (tmp_path / f"{name}.html").read_text(encoding="utf-8")

    assert "Experts per token." in page("reference/options/router")
    assert "max_violation" in page("reference/metrics")
    assert "--dry-run" in page("reference/programs")
    blocks = page("reference/api_blocks")
    assert "Build a feed-forward block from a mapping" in blocks
    for method in ("MoEConfig.num_active_params", "DenseConfig.num_params"):  # own, inherited
        assert f'id="moe_ffn.{method}"' in blocks
    assert "bool, True for the pairs that an expert computes: real" in page("reference/api_values")
    assert "SinkhornRouterConfig" in page("reference/api_routing")
    assert 'href="routers.html"' in page("studies/README")
    assert (tmp_path / "searchindex.js").is_file()
