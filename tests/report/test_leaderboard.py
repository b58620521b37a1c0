"""The leaderboard of two studies, made of a few numbers."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from moe_ffn.cli.study_page import main
from moe_ffn.config.errors import ConfigError
from moe_ffn.studies.result import RunResult, add_results
from tests.helpers.results import make_result


def dense(arm: str, seed: int, loss: float) -> RunResult:
    """Return a run of an arm whose tokens use every parameter."""
    run = make_result(arm, seed, loss, curve=[3.0, loss], options={"model.ffn": "swiglu"})
    model = replace(run.budget.model, active_params=run.budget.model.params)
    return run.model_copy(update={"budget": replace(run.budget, model=model)})


def board(studies: Path, results: dict[str, list[RunResult]]) -> str:
    """Return the page that the command makes of studies."""
    for name, runs in results.items():
        (studies / name).mkdir(parents=True, exist_ok=True)
        add_results(studies / name, runs)
    page = studies.parent / "board.md"
    assert main(["--output", str(studies), "--leaderboard", str(page)]) == 0
    return page.read_text(encoding="utf-8")


def rows(page: str) -> dict[str, list[str]]:
    """Return arm -> cells of its row in the tables of budgets."""
    tables = page.partition("\n## ")[2]
    found = [line.strip("| ").split(" | ") for line in tables.splitlines() if line[:3] == "| ["]
    return {cells[0]: cells[1:] for cells in found}


def test_only_arms_of_the_same_budget_share_a_table(tmp_path: Path) -> None:
    longer = {"trainer.max_steps": 103}
    tuned = {"optimizer.learning_rate": 0.5}
    page = board(
        tmp_path / "studies",
        {
            "a": [
                *(dense("swiglu", seed, 2 + seed / 100) for seed in range(3)),
                *(make_result("moe", s, 1.5, curve=[2.5, 1.5]) for s in range(3)),
            ],
            "b": [
                dense("same", 3, 2.03),
                make_result("longer", loss=1.0, options=longer, steps=103),
                make_result("wider", loss=1.0, options={"model.d_model": 32}, flops_per_token=1021),
                make_result("rate", loss=1.0, options=tuned, tuning=tuned, main_arm="moe"),
            ],
        },
    )

    found = rows(page)
    both = "[a](studies/a.md) swiglu = [b](studies/b.md) same"
    assert [*found] == ["[a](studies/a.md) moe", both]
    assert found[both][2] == "4"
    assert "no other arm has their budget: 2 of b." in page
    assert page.splitlines()[2].startswith(
        "**A sparse block has the lowest loss at 1 of 1 budgets**"
    )


def test_a_speed_up_counts_the_steps_to_the_dense_loss_and_their_time(tmp_path: Path) -> None:
    folder = tmp_path / "studies" / "a"
    folder.mkdir(parents=True)
    (folder / "study.yaml").write_text("{name: a, arms: {gelu: {}, moe: {}}}", encoding="utf-8")
    seconds = {"gelu": {"seconds_per_step": 0.5}, "moe": {"seconds_per_step": 0.75}}
    (folder / "timing.json").write_text(json.dumps({"arms": seconds}), encoding="utf-8")
    # From 3 at step 50 to 1 at step 100, the mixture passes the dense loss, 2, at step 75.
    moe = make_result("moe", loss=1.0, curve=[3.0, 1.0], flops_per_token=1010)

    found = rows(board(tmp_path / "studies", {"a": [dense("gelu", 0, 2.0), moe]}))

    speed, _, *speed_ups = found["[a](studies/a.md) moe"][-4:]
    assert speed == "13 (0.67)"
    assert speed_ups == ["1.32", "0.89"]  # 100 / 75 / 1.01, 100 / 75 * 0.5 / 0.75


def test_a_folder_without_a_dense_block_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no budget with results of a dense block"):
        board(tmp_path / "studies", {"a": [make_result("moe")]})
