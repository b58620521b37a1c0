"""The program: its JSON, its problems in one sentence, and what a server is sent."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from moe_ffn import load_run
from moe_ffn.cli.dashboard import parse_options
from moe_ffn.config.errors import ConfigError
from moe_ffn.report.dashboard import build_workspace, to_json
from tests.helpers.fake_wandb import WandbServer, wandb_server
from tests.helpers.tiny_runs import Finished, run_here

PROGRAM = "moe_ffn.cli.dashboard"
Dashboard = Callable[..., Finished]
NO_KEY = "no wandb key: run 'wandb login' or set WANDB_API_KEY; --json needs none"


@pytest.fixture
def dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Dashboard]:
    """Run the program with a separate home folder and a freshly imported wandb."""
    import wandb

    def run(*argv: str, **environment: str) -> Finished:
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        return run_here("--entity", "team", "--project", "project", *argv, program=PROGRAM)

    monkeypatch.setenv("HOME", str(tmp_path / "a-home"))  # wandb's own log goes there
    (tmp_path / "a-home").mkdir()
    wandb.teardown()
    yield run
    wandb.teardown()


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with wandb_server() as started:
        yield started


def test_json_goes_to_standard_output_without_a_key(
    dashboard: Dashboard,
) -> None:
    answer = dashboard("--json", WANDB_MODE="")

    assert (answer.code, answer.stderr) == (0, "")
    view = json.loads(answer.stdout)
    assert (view["entity"], view["project"], view["displayName"]) == (
        "team",
        "project",
        "Feed-forward blocks",
    )
    assert "routing/layer_00/load" in answer.stdout


def test_a_missing_wandb_workspaces_is_reported_with_the_install_command(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        parse_options(["--entity", "team", "--project", "project", "--json"])
    assert str(caught.value) == (
        "the dashboard needs wandb-workspaces: pip install wandb-workspaces"
    )


def test_a_missing_api_key_is_reported_with_how_to_get_one(dashboard: Dashboard) -> None:
    assert dashboard().mistake == NO_KEY


@pytest.mark.slow
def test_a_malformed_key_is_named(dashboard: Dashboard) -> None:
    answer = dashboard(WANDB_API_KEY="abc")
    assert "WANDB_API_KEY invalid: API key must have 40+ characters, has 3" in answer.mistake


def test_a_new_view_is_saved_and_its_address_printed(
    dashboard: Dashboard, server: WandbServer
) -> None:
    answer = dashboard(**server.environment)

    assert (answer.code, answer.stderr) == (0, "")
    assert answer.stdout == f"{server.url}/team/project?nw=abc\n"
    (sent,) = server.upserts
    assert sent["entityName"] == "team"
    assert sent["projectName"] == "project"
    assert sent["displayName"] == "Feed-forward blocks"
    assert sent["type"] == "project-view"
    assert "id" not in sent
    built = json.loads(to_json(build_workspace("team", "project")))["spec"]
    assert names_in(json.loads(sent["spec"])) == names_in(built)


def names_in(spec: dict[str, Any]) -> list[str]:
    sections = spec["section"]["panelBankConfig"]["sections"]
    return [panel["config"].get("chartTitle") for part in sections for panel in part["panels"]]


def test_a_rejection_of_the_server_is_passed_on(dashboard: Dashboard, server: WandbServer) -> None:
    server.unsupported = "project not found"
    answer = dashboard(**server.environment)
    assert answer.mistake == (
        "wandb did not save the workspace: input: project not found; check the network, the key and "
        "team/project, or use --json"
    )


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up(dashboard: Dashboard, server: WandbServer) -> None:
    server.speaks.clear()

    start = time.monotonic()
    answer = dashboard(**server.environment)

    assert 4 < time.monotonic() - start < 20
    assert answer.mistake.startswith("wandb did not save the workspace: Failed to verify")
    assert answer.mistake.endswith(
        "did not respond in time; check the network, the key and team/project, or use --json"
    )


# -- A run with product keys in a layer: programs show its routings, or the reason why they cannot


RunTrain = Callable[..., Any]

ROUTER = "{type: product_key, k: 4, d_query: 8}"
LISTED = f"{{type: moe, num_experts: 1024, router: {ROUTER}, experts: single_neuron}}"


@pytest.fixture(scope="module")
def run(run_train: RunTrain, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Layer 0 with experts that have a load, layer 1 with product keys."""
    where = tmp_path_factory.mktemp("listed")
    options = ("--model.ffn", "moe", "--model.ffn_at", f"{{'1': {LISTED}}}")
    return run_train(where, *options, "--trainer.max_steps", "4", has_page=True)


def test_rows_of_pairs_only_routings_have_no_load(run: Any) -> None:
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


def test_a_trace_shows_the_other_layer_or_rejects(
    run: Any, run_train: RunTrain, tmp_path: Path
) -> None:
    found = run_here(str(run.folder), "--text", "def", program="moe_ffn.cli.trace")
    assert found.code == 0, found.stderr
    options = ("--model.ffn", LISTED, "--trainer.max_steps", "1")
    alone = run_train(tmp_path, *options, has_page=True)
    rejected = run_here(str(alone.folder), "--text", "def", program="moe_ffn.cli.trace")
    assert rejected.code == 2
    assert rejected.stderr.strip() == (
        f"error: '{alone.folder}' cannot be traced: its routers, like router.type 'product_key', do not "
        "score every expert; moe-ffn report shows the share of experts used"
    )
    page = (alone.folder / "report.html").read_text(encoding="utf-8")
    assert "its routers have too many experts to show each one" in page
