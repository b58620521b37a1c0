"""`plan`: its table, its verdict, and what it does not take."""

from __future__ import annotations

from pathlib import Path

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
    assert " s per step, bound by " in said
    assert "a GPU has 80 GB, computes " in " ".join(said.split())


def test_figures_may_be_given_and_a_model_that_is_too_large_is_said() -> None:
    code, said = plan("--gpus", "2", "--memory-gb", "0.001")
    assert code == 1
    assert (
        "none fits: the smallest takes 0.0 of 0 GB; give more --gpus, a smaller data.batch_size"
        in said
    )


def test_a_page_shows_the_memory_of_each_layout(tmp_path: Path) -> None:
    path = tmp_path / "plan.html"

    code, said = plan("--gpus", "2", "--plot", str(path))

    assert (code, said.splitlines()[-1]) == (0, f"written: {path}")
    drawn = path.read_text(encoding="utf-8")
    assert drawn.startswith("<!doctype html>")
    for text in ("activations", "80 GB", "1 x 1 x 2"):
        assert text in drawn
