"""`plan`: its table, its verdict, and what it does not take."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.synthetic_run import write_metrics, write_run
from tests.helpers.tiny_runs import run_here

TINY = (
    *("--model.d_model", "32", "--model.num_layers", "2", "--data.batch_size", "8"),
    *("--data.seq_len", "64", "--model.ffn", "{type: moe, num_experts: 4}"),
)


def plan(*argv: str) -> tuple[int, str]:
    done = run_here(*TINY, *argv, program="moe_ffn.cli.plan")
    return done.code, done.stdout + done.stderr


def test_every_layout_that_fits_has_a_row_and_the_fastest_is_said() -> None:
    code, said = plan("--gpus", "4")
    assert code == 0
    rows = [line for line in said.splitlines() if line.count(" x ") == 2 and "mesh" not in line]
    assert {row.strip()[:9] for row in rows} >= {"4 x 1 x 1", "1 x 4 x 1", "1 x 1 x 4"}
    assert "parallel: {data: " in said
    assert " s a step, bound by " in said


def test_figures_may_be_given_and_a_model_that_is_too_large_is_said() -> None:
    code, said = plan("--gpus", "2", "--memory-gb", "0.001")
    assert code == 1
    assert (
        "none fits: the smallest takes 0.0 of 0 GB; give more --gpus, a smaller data.batch_size"
        in said
    )


def test_the_balance_of_a_run_makes_steps_longer_and_is_drawn(tmp_path: Path) -> None:
    # Of four experts the first two take 0.7 of the pairs; ten rows later all are alike.
    run = write_run(tmp_path / "a-run", layers=1, experts=4, rows=20)
    loads = [[0.5, 0.2, 0.2, 0.1]] * 10 + [[0.25] * 4] * 10
    rows = [{"step": n, "routing/layer_00/load": load} for n, load in enumerate(loads, 1)]
    write_metrics(run / "metrics.jsonl", rows)
    path = tmp_path / "plan.html"

    code, said = plan("--gpus", "2", "--routing", str(run), "--plot", str(path))

    assert code == 0
    assert f"written: {path}" in said
    said = said.partition("If a-run were routed so (1 layers, 4 experts, 20 rows)")[2]
    (row,) = (cells for line in said.splitlines() if (cells := line.split())[:3] == ["1", "1", "2"])
    balanced, first, last = float(row[3]), float(row[5]), float(row[8])
    assert (row[4], row[7], row[9]) == ("0.40", "0.00", "0%")
    assert first > last == balanced
    drawn = path.read_text(encoding="utf-8")
    assert drawn.startswith("<!doctype html>")
    for text in ("activations", "80 GB", "1 x 1 x 2", "expert 2", "MaxVio of the ranks"):
        assert text in drawn


def test_a_run_without_experts_has_no_balance(tmp_path: Path) -> None:
    run = write_run(tmp_path / "a-run", experts=0)
    code, said = plan("--gpus", "2", "--routing", str(run))
    assert code == 2
    assert said.splitlines()[-1] == (
        f"error: '{run}' has no loads of experts in its rows; give a run of an MoE that has begun"
    )


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["--gpu", "h10"], "--gpu: unknown 'h10'; did you mean 'h100'?"),
        (["--gpus", "0"], "--gpus: must be a whole number from 1 to 65536, got '0'"),
        (["--efficiency", "2"], "--efficiency: must be a number above 0 and up to 1, got '2'"),
        (["--memory-gb", "x"], "--memory-gb: must be a number above 0 and up to 1e+09, got 'x'"),
        (
            ["--gpus", "3"],
            "data.batch_size (8) must be divisible by the number of ranks (3): it counts the sequences of "
            "all ranks together; give 9, or other ranks",
        ),
    ],
)
def test_what_it_does_not_take_is_refused(argv: list[str], sentence: str) -> None:
    code, said = plan(*argv)
    assert code == 2
    assert said.splitlines()[-1] == f"error: {sentence}"
