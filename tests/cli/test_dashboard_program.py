"""The program: its JSON, its refusals in one sentence, and what a server is sent."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.cli.dashboard import parse_options
from moe_ffn.config.errors import ConfigError
from moe_ffn.report.dashboard import build_workspace, to_json
from tests.helpers.fake_wandb import WandbServer, wandb_server
from tests.helpers.tiny_runs import run_here

WHERE = ("--entity", "team", "--project", "project")
NO_KEY = "no wandb key: run 'wandb login' or set WANDB_API_KEY; --json needs none"


@dataclass(frozen=True)
class Answer:
    code: int
    stdout: str
    stderr: str
    seconds: float

    @property
    def refusal(self) -> str:
        """The one line of a refusal, without `error: `."""
        assert self.code == 2, self.stderr
        assert self.stdout == ""
        (line,) = self.stderr.splitlines()
        assert line.startswith("error: ")
        return line.removeprefix("error: ")


@pytest.fixture
def dashboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Answer]:
    """Run the program with a home folder of its own, and a wandb that knows of no earlier call."""

    def run(*argv: str, **environment: str) -> Answer:
        import wandb

        for name, value in {"HOME": str(home), **environment}.items():
            monkeypatch.setenv(name, value)
        wandb.teardown()
        start = time.monotonic()
        done = run_here(*argv, program="moe_ffn.cli.dashboard")
        seconds = time.monotonic() - start
        wandb.teardown()
        return Answer(done.code, done.stdout, done.stderr, seconds)

    home = tmp_path / "a-home"  # wandb's own log goes there
    home.mkdir()
    return run


@pytest.fixture
def server() -> Iterator[WandbServer]:
    with wandb_server() as started:
        yield started


# -------------------------------------------------------------------------------------- the JSON


def test_json_goes_to_standard_output_without_a_key(
    dashboard: Callable[..., Answer],
) -> None:
    answer = dashboard(*WHERE, "--json", WANDB_MODE="")

    assert (answer.code, answer.stderr) == (0, "")
    view = json.loads(answer.stdout)
    assert (view["entity"], view["project"], view["displayName"]) == (
        "team",
        "project",
        "Feed-forward blocks",
    )
    assert "routing/layer_00/load" in answer.stdout


# ------------------------------------------------------------------------------------- refusals


def test_without_the_library_the_program_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    with pytest.raises(ConfigError) as caught:
        parse_options([*WHERE, "--json"])

    assert str(caught.value) == (
        "the dashboard needs wandb-workspaces; install with: pip install '.[dashboard]'"
    )


def test_without_a_key_the_program_says_how_to_get_one(dashboard: Callable[..., Answer]) -> None:
    assert dashboard(*WHERE).refusal == NO_KEY


@pytest.mark.slow
def test_a_malformed_key_is_named(dashboard: Callable[..., Answer]) -> None:
    answer = dashboard(*WHERE, WANDB_API_KEY="abc")

    assert "WANDB_API_KEY invalid: API key must have 40+ characters, has 3" in answer.refusal


# ------------------------------------------------------------------------------------ a server


def test_a_new_view_is_saved_and_its_address_printed(
    dashboard: Callable[..., Answer], server: WandbServer
) -> None:
    answer = dashboard(*WHERE, **server.environment)

    assert (answer.code, answer.stderr) == (0, "")
    assert answer.stdout == f"{server.url}/team/project?nw=abc\n"
    (sent,) = server.upserts
    assert sent["entityName"] == "team"
    assert sent["projectName"] == "project"
    assert sent["displayName"] == "Feed-forward blocks"
    assert sent["type"] == "project-view"
    assert "id" not in sent
    built = json.loads(to_json(build_workspace("team", "project")))["spec"]
    assert without_ids(json.loads(sent["spec"])) == without_ids(built)


def without_ids(spec: dict[str, Any]) -> dict[str, Any]:
    """A view's specification without the random ids of its panels and of its list of runs."""
    spec["section"].pop("customRunColors", None)
    spec["section"]["runSets"][0].pop("id")
    for section in spec["section"]["panelBankConfig"]["sections"]:
        for panel in section["panels"]:
            panel.pop("__id__")
    return spec


def test_a_refusal_of_the_server_is_passed_on(
    dashboard: Callable[..., Answer], server: WandbServer
) -> None:
    server.refusal = "project not found"

    answer = dashboard(*WHERE, **server.environment)

    assert answer.refusal == (
        "wandb did not save the workspace: input: project not found; check the network, the key and "
        "team/project, or use --json"
    )


@pytest.mark.slow
def test_a_server_that_never_answers_is_given_up(
    dashboard: Callable[..., Answer], server: WandbServer
) -> None:
    server.speaks.clear()

    answer = dashboard(*WHERE, **server.environment)

    assert answer.refusal.startswith("wandb did not save the workspace: Failed to verify")
    assert answer.refusal.endswith(
        "did not respond in time; check the network, the key and team/project, or use --json"
    )
    assert 4 < answer.seconds < 20
