"""A run with product keys in a layer: programs show its routings, or the reason why they cannot."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn import load_run
from tests.helpers.tiny_runs import run_here

RunTrain = Callable[..., Any]

ROUTER = "{type: product_key, k: 4, d_query: 8}"
LISTED = f"{{type: moe, num_experts: 1024, router: {ROUTER}, experts: single_neuron}}"


@pytest.fixture(scope="module")
def run(run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Layer 0 with experts that have a load, layer 1 with product keys."""
    where = tmp_path_factory.mktemp("listed")
    options = ("--model.ffn", "moe", "--model.ffn_at", f"{{'1': {LISTED}}}")
    return run_train(where, *options, "--trainer.max_steps", "4", has_page=True)


def test_rows_hold_what_pairs_tell_and_no_load(run: Any) -> None:
    assert run.code == 0, run.stderr
    rows = load_run(run.folder).rows
    for prefix in ("", "validation/"):
        found = {key for key in rows.columns if key.startswith(f"{prefix}routing/layer_01/")}
        always = ("dropped_fraction", "entropy", "logit_max", "experts_per_token", "load_balance")
        own = ("router_z", "nonfinite_tokens", "experts_used", "usage_kl")
        # Without a capacity and a shared expert, these two are not finite, and in no row.
        absent = {f"{prefix}routing/layer_01/{key}" for key in ("capacity_used", "shared_share")}
        assert found - absent == {f"{prefix}routing/layer_01/{key}" for key in (*always, *own)}
        assert f"{prefix}routing/layer_00/load/expert_00" in rows.columns
    used = rows.column("routing/layer_01/experts_used").last
    assert used is not None
    assert 0 < used < 1
    assert rows.column("routing/layer_01/experts_per_token").last == 4


def test_the_end_of_a_run_shows_both_kinds(run: Any) -> None:
    shown = " ".join(run.stdout.split())
    assert "every expert is used" in shown or "experts without a token" in shown
    assert "experts that a batch of the validation split used layer 1: " in shown
    page = (run.folder / "report.html").read_text(encoding="utf-8")
    assert "The tokens of each expert are not shown" not in page  # of layer 0 it is
    assert "Experts used" in page


def test_a_run_is_resumed(run: Any, run_train: RunTrain) -> None:
    more = run_here(
        "--resume", str(run.folder), "--trainer.max_steps", "6", program="moe_ffn.cli.train"
    )
    assert more.code == 0, more.stderr
    assert load_run(run.folder).rows.column("routing/layer_01/usage_kl").steps[-1] == 6


def test_checkpoints_hold_nothing_for_each_expert_of_it(run: Any) -> None:
    path = max((run.folder / "checkpoints").glob("step_*.ckpt"))
    routing = torch.load(path, weights_only=True)["callbacks"]["StepLogger"]["routing"]
    assert {*routing["probe"], *routing["idle_steps"]} == {"layer_00"}


def test_evaluation_has_a_column_for_it(run: Any) -> None:
    found = run_here(str(run.folder), program="moe_ffn.cli.evaluate")
    assert found.code == 0, found.stderr
    assert "(of a batch)" in " ".join(found.stdout.split())


def test_a_trace_shows_the_other_layer_or_refuses(
    run: Any, run_train: RunTrain, tmp_path: Path
) -> None:
    found = run_here(str(run.folder), "--text", "def", program="moe_ffn.cli.trace")
    assert found.code == 0, found.stderr
    options = ("--model.ffn", LISTED, "--trainer.max_steps", "1")
    alone = run_train(tmp_path, *options, has_page=True)
    refused = run_here(str(alone.folder), "--text", "def", program="moe_ffn.cli.trace")
    assert refused.code == 2
    assert refused.stderr.strip() == (
        f"error: '{alone.folder}' cannot be traced: its routers, like router.type 'product_key', do not "
        "score every expert; moe-ffn report shows the share of experts used"
    )
    page = (alone.folder / "report.html").read_text(encoding="utf-8")
    assert "its routers have too many experts to show each one" in page
