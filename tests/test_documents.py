"""The tutorial's code runs, and the documents that people and tools look for hold what they should."""

from __future__ import annotations

import json
import re
import shlex
import statistics
import subprocess
import tomllib
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import yaml

import moe_ffn
from moe_ffn.cli.__main__ import run
from tests.helpers.tiny_runs import ForkedTraining

ROOT = Path(__file__).parents[1]
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text(encoding="utf-8")

BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", TUTORIAL, flags=re.DOTALL | re.MULTILINE)

TINY = [
    *("--data.corpus", "{type: text, paths: [text.txt]}", "--data.cache_dir", "cache"),
    *("--data.seq_len", "16", "--data.validation_tokens", "160", "--trainer.max_steps", "2"),
    *("--trainer.accelerator", "cpu", "--logging.wandb.mode", "disabled"),
    *("--sample.num_tokens", "4"),
]


def test_the_tutorial_runs_from_its_beginning_to_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Blocks that begin with the name of a file are written there; commands get options of a short run."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("moe_ffn.studies.sweep.Popen", ForkedTraining)
    Path("text.txt").write_text("def f(x):\n    return x\nthe cat sat on a mat\n" * 80)
    names: dict[str, Any] = {}
    printed = ""
    for language, block in BLOCKS:
        named = re.match(r"# (\S+\.\w+)\n", block)
        if named is not None:
            Path(named[1]).write_text(block, encoding="utf-8")
        elif language == "python":
            exec(compile(block, "tutorial.md", "exec"), names)
        else:
            for line in block.splitlines():
                command, *argv = shlex.split(line, comments=True)
                assert command == "moe-ffn"
                tiny = TINY if argv[0] in ("train", "sweep") else []
                assert run([*argv, *tiny]) == 0, line
        printed += capsys.readouterr().out

    assert names["counting"][-1] < 0.7 * names["counting"][0], "the model of the first step learns"
    assert names["load_E"].sum() == 2 * 16 * 16, "two experts of each token"
    assert "pairs of each expert: [" in printed
    assert Path("runs/report.html").is_file()
    assert "layer 0" in printed
    assert names["first_layer"].num_experts == 8
    assert len(names["losses"]) > 0
    assert len(names["new_ids"]) == 32
    assert names["text"].startswith("def ")
    assert len(names["text"]) > len("def ")
    assert Path("runs/direction/summary.json").is_file()
    assert "MaxVio" in printed
    assert names["output"].routing.num_experts == 8
    assert (
        "MoEFFN: router.type 'expert_choice' ranks tokens against later ones, so a causal model"
        in printed
    )
    assert {name for name in ("cache", "runs") if Path(name).is_dir()} == {"cache", "runs"}


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


def test_the_changelog_begins_with_what_is_not_released_and_knows_every_version() -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    versions = re.findall(r"^## \[(.+?)\](?: - (\S+))?$", text, flags=re.MULTILINE)

    assert versions[0] == ("Unreleased", "")
    released = dict(versions[1:])
    assert moe_ffn.__version__ in released
    assert all(date.fromisoformat(day) for day in released.values())
    headings = set(re.findall(r"^### (.+)$", text, flags=re.MULTILINE))
    assert headings <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}


def test_contributing_names_files_and_targets_that_there_are() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    targets = re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)

    for target in re.findall(r"\bmake ([a-z-]+)", text):
        assert target in targets
    paths = re.findall(r"`((?:moe_ffn|tests|docs|configs|experiments)/[\w/.]*)`", text)
    assert len(paths) > 8
    for path in paths:
        assert (ROOT / path).exists(), path


def test_the_table_of_pruned_experts_has_the_recorded_losses() -> None:
    text = (ROOT / "docs" / "initialising.md").read_text(encoding="utf-8")
    found = json.loads((ROOT / "docs" / "pruning.json").read_text(encoding="utf-8"))
    every = found["num_experts"]
    assert f"{found['loss']:.4f} with all {every} experts" in text
    for num_experts, by_method in found["losses"].items():
        *ones, draws = by_method.values()
        cells = [num_experts, f"{1 - int(num_experts) / every:.0%}", *(f"{x:.4f}" for (x,) in ones)]
        cells.append(f"{statistics.fmean(draws):.4f} ± {statistics.stdev(draws):.4f}")
        assert f"| {' | '.join(cells)} |\n" in text


@pytest.mark.slow
def test_the_api_reference_has_a_page_for_every_room(tmp_path: Path) -> None:
    asked = subprocess.run(
        ["make", "--dry-run", "docs"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    (command,) = re.findall(r"^\S+ -m pdoc .*$", asked.stdout, flags=re.MULTILINE)
    assert "--output-directory build/docs" in command
    command = command.replace("build/docs", str(tmp_path))
    subprocess.run(shlex.split(command), cwd=ROOT, capture_output=True, check=True)

    for module in shlex.split(command.partition(str(tmp_path))[2]):
        assert (tmp_path / f"{module.replace('.', '/')}.html").is_file(), module
    routing = (tmp_path / "moe_ffn" / "routing.html").read_text(encoding="utf-8")
    assert "Softmax top-k: each token goes to its k most probable experts." in routing
    assert "Experts per token." in routing, "the meaning of an option"
    assert (tmp_path / "index.html").is_file()
