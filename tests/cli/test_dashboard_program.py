"""The program: its JSON, its problems in one sentence, and what a server is sent."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

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
    """Run the program with a home folder of its own, and a wandb that knows of no earlier call."""
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


def unsupported(done: Finished) -> str:
    """Return the one line of a refusal, without `error: `."""
    assert (done.code, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    return line.removeprefix("error: ")


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


def test_without_the_library_the_program_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        parse_options(["--entity", "team", "--project", "project", "--json"])
    assert str(caught.value) == (
        "the dashboard needs wandb-workspaces: pip install wandb-workspaces"
    )


def test_without_a_key_the_program_says_how_to_get_one(dashboard: Dashboard) -> None:
    assert unsupported(dashboard()) == NO_KEY


@pytest.mark.slow
def test_a_malformed_key_is_named(dashboard: Dashboard) -> None:
    answer = dashboard(WANDB_API_KEY="abc")
    assert "WANDB_API_KEY invalid: API key must have 40+ characters, has 3" in unsupported(answer)


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


def test_a_refusal_of_the_server_is_passed_on(dashboard: Dashboard, server: WandbServer) -> None:
    server.unsupported = "project not found"
    answer = dashboard(**server.environment)
    assert unsupported(answer) == (
        "wandb did not save the workspace: input: project not found; check the network, the key and "
        "team/project, or use --json"
    )


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up(dashboard: Dashboard, server: WandbServer) -> None:
    server.speaks.clear()

    start = time.monotonic()
    answer = dashboard(**server.environment)

    assert 4 < time.monotonic() - start < 20
    assert unsupported(answer).startswith("wandb did not save the workspace: Failed to verify")
    assert unsupported(answer).endswith(
        "did not respond in time; check the network, the key and team/project, or use --json"
    )
