"""A tiny trained sweep becomes a page, which can be rebuilt without the runs."""

from __future__ import annotations

import json
import re
import shutil
from importlib import import_module
from pathlib import Path

import pytest

from moe_ffn.studies.result import add_results
from tests.helpers.same_run import snapshot
from tests.helpers.synthetic_run import make_result
from tests.helpers.tiny_runs import ForkedTraining, cli, run_here

STUDY = """
question: Which?
seeds: [0, 1]
baseline: dense
arms:
  dense: {model.ffn: {type: dense, d_ff: 32}, optimizer: {type: adamw}}
  moe: {model.ffn: {type: moe, num_experts: 4, router: {type: top_k, k: 1}}, optimizer: {type: adamw}}
"""


page = cli("study_page")


@pytest.fixture(autouse=True)
def _study(tmp_path: Path) -> None:
    (tmp_path / "which.yaml").write_text(STUDY, encoding="utf-8")


DENSE = {"model.ffn": {"type": "dense", "d_ff": 32}}


def names(folder: Path) -> list[str]:
    """The runs in the table of a folder."""
    lines = (folder / "results.jsonl").read_text(encoding="utf-8").splitlines()
    return [f"{run['arm']}-seed{run['seed']}" for run in map(json.loads, lines)]


def test_the_page_of_a_trained_sweep_can_be_rebuilt_without_its_runs(
    tiny_yaml: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import_module("moe_ffn.runs.train.run")
    monkeypatch.setattr("moe_ffn.studies.sweep.Popen", ForkedTraining)
    tiny = [*tiny_yaml.read_text("utf-8").splitlines(), f"data.cache_dir: {tmp_path / 'cache'}"]
    config = "\n".join(f"  {line}" for line in tiny)
    (tmp_path / "which.yaml").write_text(f"config:\n{config}\n{STUDY}", encoding="utf-8")
    where = ("--run.output_dir", str(tmp_path / "runs"))
    swept = run_here("--config", "which.yaml", *where, program="experiments.sweep")
    assert swept.code == 0, swept.stderr

    done = page("which.yaml", "--runs", "runs/which")

    written = "".join(
        f"written: docs/studies/{name}\n"
        for name in ("which.md", "which/figures.html", "README.md")
    )
    assert (done.code, done.stdout) == (0, written), done.stderr
    studies = tmp_path / "docs" / "studies"
    text = (studies / "which.md").read_text(encoding="utf-8")
    assert text.startswith("# Which?\n")
    assert "moe minus dense: " in text
    assert " nats per token in 2 seeds, too few for an interval" in text
    assert "| dense | 2 |" in text
    assert {path.name for path in (studies / "which").iterdir()} == {
        *("results.jsonl", "study.yaml", "figures.html")
    }
    assert names(studies / "which") == ["dense-seed0", "dense-seed1", "moe-seed0", "moe-seed1"]
    table = (studies / "which" / "results.jsonl").read_text(encoding="utf-8")
    assert str(tmp_path) not in table.replace("corpus", "")
    copied = (studies / "which" / "study.yaml").read_text(encoding="utf-8")
    assert "output_dir" not in copied.partition("overrides")[2], "of this machine"
    assert re.search(r"^\| date \| 20\d\d-\d\d-\d\d \|$", text, flags=re.MULTILINE)
    assert "| [Which?](which.md) | " in (studies / "README.md").read_text(encoding="utf-8")

    before = snapshot(studies)
    shutil.rmtree(tmp_path / "runs")
    assert page(str(tmp_path / "which.yaml")).code == 0
    assert snapshot(studies) == before, "whose commands name the file as seen from here"
    assert "sweep --config which.yaml\n" in text


def test_an_added_seed_appears_on_the_page(tmp_path: Path) -> None:
    folder = tmp_path / "pages" / "which"
    folder.mkdir(parents=True)
    blocks = {"dense": {"type": "dense", "d_ff": 32}, "moe": {"type": "moe", "num_experts": 4}}
    blocks["moe"] |= {"router": {"type": "top_k", "k": 1}}
    for seed in (0, 1):
        for arm, block in blocks.items():
            loss = 2 + seed / 10
            add_results(folder, [make_result(arm, seed, loss, options={"model.ffn": block})])
    assert page("which.yaml", "--output", "pages").code == 0
    assert "| moe | 2 |" in (tmp_path / "pages" / "which.md").read_text(encoding="utf-8")

    for arm, block in blocks.items():
        add_results(folder, [make_result(arm, 2, 2.5, options={"model.ffn": block})])
    assert page("which.yaml", "--output", "pages").code == 0
    assert "| moe | 3 |" in (tmp_path / "pages" / "which.md").read_text(encoding="utf-8")

    changed = blocks["dense"] | {"d_ff": 33}
    add_results(folder, [make_result("dense", 1, 2.5, options={"model.ffn": changed})])
    assert page("which.yaml", "--output", "pages").mistake == (
        "'which.yaml' plans model.ffn.d_ff: 32, but the result of dense-seed1 has 33; train it again, or "
        "restore the file or its base"
    )
    off = {"model.ffn": blocks["dense"], "trainer.gradient_clip_val": None}
    add_results(folder, [make_result("dense", 1, 2.5, options=off)])
    assert page("which.yaml", "--output", "pages").mistake == (
        "'which.yaml' plans trainer.gradient_clip_val: 1.0, but the result of dense-seed1 has None; train "
        "it again, or restore the file or its base"
    )


def test_options_missing_from_a_result_and_sweep_flags_count_as_planned(tmp_path: Path) -> None:
    text = "arms: {dense: {model.ffn: {type: dense, d_ff: 32}, optimizer: {type: adamw}, "
    text += "trainer.max_time: {hours: 2}}}\n"
    text += "tuning: {seeds: [0], grid: {optimizer.learning_rate: [0.5]}}\n"
    (tmp_path / "which.yaml").write_text(text, encoding="utf-8")
    runs = tmp_path / "runs"
    runs.mkdir()
    result = make_result("dense", 0, options={"model.ffn": {"type": "dense", "d_ff": 32}})
    del result.config["trainer"]["max_time"]  # as before there was such an option
    result.config["trainer"]["max_steps"] = 7
    tuned = result.model_copy(deep=True, update={"arm": "dense,learning_rate=0.5"})
    tuned.config["optimizer"]["learning_rate"] = 0.5
    tuned.tuning["optimizer.learning_rate"] = 0.5
    add_results(runs, [result, tuned, make_result("dense", 1, is_finished=False)])
    assert "plans trainer.max_steps: " in page("which.yaml", "--runs", "runs").mistake

    (runs / "study.yaml").write_text(f"{text}overrides: {{trainer: {{max_steps: 7}}}}\n")
    done = page("which.yaml", "--runs", "runs")

    assert done.code == 0, done.stderr
    assert done.stderr.startswith("left out: 'runs/results.jsonl:3' is not finished")


def test_runs_of_another_study_are_rejected(tmp_path: Path) -> None:
    folder, runs = tmp_path / "docs/studies/which", tmp_path / "runs"
    runs.mkdir()
    add_results(runs, [make_result("swiglu", 0)])
    assert page("which.yaml", "--runs", "runs").mistake == (
        "--runs: 'runs' holds no run of 'which.yaml': swiglu-seed0 belongs to none of its arms, dense, "
        "moe; give the folder of its runs"
    )
    assert not folder.exists()

    changed = {"model.ffn": {"type": "dense", "d_ff": 33}}
    add_results(runs, [make_result("dense", 0, options=changed)])
    assert (
        "'which.yaml' plans model.ffn.d_ff: 32, but" in page("which.yaml", "--runs", "runs").mistake
    )
    assert not folder.exists()

    add_results(runs, [make_result("dense", 0, options=DENSE)])
    done = page("which.yaml", "--runs", "runs")
    assert done.code == 0
    assert done.stderr == "left out: swiglu-seed0 belongs to no arm of 'which.yaml'\n"
    assert names(folder) == ["dense-seed0"]


def test_bad_input_is_one_sentence(tmp_path: Path) -> None:
    assert page("which.yaml").mistake == (
        "'docs/studies/which' does not exist: there are no results of 'which' yet; train its runs, "
        "moe-ffn sweep --config which.yaml, and give --runs runs/which"
    )
    assert "'nowhere' does not exist" in page("which.yaml", "--runs", "nowhere").mistake
    for studies in ((), ("which.yaml", "which.yaml")):
        wrong = page(*studies, "--runs", "x", "--leaderboard", "board.md").mistake
        assert f"--runs: needs exactly one study, got {len(studies)}; give one" in wrong
    assert "'no.yaml': No such file" in page("no.yaml").mistake
    (tmp_path / "docs" / "studies" / "which").mkdir(parents=True)
    folder = tmp_path / "docs" / "studies" / "which"
    (folder / "dense-seed0.json").write_text("{}")
    assert "which' has no runs and no results.jsonl; give" in page("which.yaml").mistake
    add_results(folder, [make_result("other", 0)])
    assert page("which.yaml").mistake == (
        "which: no result belongs to one of its arms, dense, moe; give the folder of its runs"
    )
    (folder / "results.jsonl").write_text("{")
    assert "which/results.jsonl:1' is not the result of a run" in page("which.yaml").mistake
