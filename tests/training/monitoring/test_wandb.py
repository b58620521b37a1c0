"""What becomes of wandb without a key, a network or a package; rows; and the real client, resumed.

Whole runs of the program with the real client: `tests/cli/test_train_wandb.py`.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_ffn.training.config import WandbConfig
from moe_ffn.training.monitoring.loggers import WandbRun, wandb_logger
from tests.helpers.cut import Cut, cutting
from tests.helpers.fake_wandb import StubWandb, history, inspect
from tests.helpers.tiny_runs import options, run_here

pytestmark = pytest.mark.usefixtures("nobodys_wandb")

COMMANDS = (
    "view: wandb leet runs/mine/wandb/offline-run-1; "
    "upload: wandb sync runs/mine/wandb/offline-run-1"
)


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`start(StubWandb(...), WandbConfig(...))`: the logger and the line."""

    def run(wandb: Any, config: WandbConfig | None = None) -> tuple[WandbRun | None, str]:
        monkeypatch.setitem(sys.modules, "wandb", wandb)
        run_dir = tmp_path / "runs" / "mine"
        return wandb_logger(config or WandbConfig(), run_dir, ["moe"], {"seed": 0})

    return run


# -- which mode, and which line


OFF = "the disk is full"
LINES: dict[str, tuple[str, tuple[str, ...], list[str], bool | None, str]] = {
    "online": ("auto", (), ["online"], True, "wandb: online, https://wandb.example/run"),
    "no connection": (
        "online",
        ("online",),
        ["online", "offline"],
        False,
        f"wandb: offline ({OFF}); {COMMANDS}",
    ),
    "offline": ("offline", (), ["offline"], False, f"wandb: offline; {COMMANDS}"),
    "nothing works": (
        "auto",
        ("online", "offline"),
        ["online", "offline"],
        None,
        f"wandb: off ({OFF}), metrics are in metrics.jsonl",
    ),
}
"""Option, modes that fail, modes that are tried, whether the run is online, and the line."""


@pytest.mark.parametrize(("mode", "failing", "tried", "online", "line"), LINES.values(), ids=LINES)
def test_a_run_is_online_if_possible_or_says_why_not(
    start: Any,
    mode: Any,
    failing: tuple[str, ...],
    tried: list[str],
    online: bool | None,
    line: str,
) -> None:
    wandb = StubWandb(failing=failing, why=f"{OFF}.")
    logger, said = start(wandb, WandbConfig(mode=mode))
    assert (logger and logger.online) == online
    assert wandb.modes == tried
    assert said == line


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_the_option_wins_over_the_environment(
    start: Any, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    wandb = StubWandb()
    monkeypatch.setenv("WANDB_MODE", "online")
    start(wandb, WandbConfig(mode=mode))
    assert wandb.modes == ([] if mode == "disabled" else ["offline"])


@pytest.mark.parametrize(
    ("environment", "modes"),
    [
        ("offline", ["offline"]),
        ("dryrun", ["offline"]),
        ("online", ["online"]),
        ("run", ["online"]),
        ("shared", ["online"]),
        ("disabled", []),
        ("", ["online"]),
    ],
)
def test_auto_follows_the_environment_and_empty_is_unset(
    start: Any, monkeypatch: pytest.MonkeyPatch, environment: str, modes: list[str]
) -> None:
    wandb = StubWandb()
    monkeypatch.setenv("WANDB_MODE", environment)
    start(wandb)
    assert wandb.modes == modes
    assert "WANDB_MODE" not in os.environ, "wandb itself refuses the empty string"


def test_a_key_may_end_in_a_newline(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a key from a file\n")
    start(StubWandb())
    assert os.environ["WANDB_API_KEY"] == "a key from a file"


def test_a_leftover_wandb_folder_is_no_package(start: Any) -> None:
    # `import wandb` beside a folder `./wandb` gives a namespace package with nothing in it.
    logger, line = start(SimpleNamespace())
    assert logger is None
    assert line == "wandb: not installed, metrics are in metrics.jsonl (pip install wandb)"


def test_the_run_is_named_tagged_and_described(start: Any) -> None:
    wandb = StubWandb()
    start(wandb, WandbConfig(project="mine", entity="us", group="ours"))

    (arguments,) = wandb.started
    assert arguments["project"] == "mine"
    assert arguments["group"] == "ours"
    assert arguments["entity"] == "us"
    assert arguments["name"] == "mine"
    assert arguments["tags"] == ["moe"]
    assert arguments["config"] == {"seed": 0}
    assert arguments["id"] is None


def test_the_newest_run_of_the_folder_is_resumed(start: Any, tmp_path: Path) -> None:
    for name in ("run-20260102_030405-old", "offline-run-20260103_000000-new"):
        (tmp_path / "runs/mine/wandb" / name).mkdir(parents=True)
    wandb = StubWandb()

    start(wandb)

    (arguments,) = wandb.started
    assert (arguments["id"], arguments["resume"]) == ("new", "allow")


# -- the real client


@pytest.fixture
def real_wandb() -> Iterator[Any]:
    import wandb

    yield wandb
    wandb.teardown()


@pytest.mark.slow
def test_a_resumed_run_resumes_its_wandb_run(real_wandb: Any, tmp_path: Path) -> None:
    argv = options(
        tmp_path,
        run__name="run",
        logging__wandb__mode="offline",
        logging__every_n_steps="1",
        trainer__max_steps="4",
        trainer__validate_every_n_steps="2",
    )
    with cutting(Cut("asked to end in a validation", 2, within="validation_step")):
        assert run_here(*argv).code == 143
    real_wandb.teardown()
    done = run_here("--resume", str(tmp_path / "runs/run"))
    assert done.code == 0, done.stderr

    folders = sorted((tmp_path / "runs/run/wandb").glob("offline-run-*"))
    first, second = [inspect(folder, dict(os.environ)) for folder in folders]
    ids = {r["run"]["run_id"] for r in [*first, *second] if r["type"] == "run"}
    assert len(ids) == 1
    rows = history([*first, *second])
    steps = {"train/loss": [1, 2, 3, 4], "validation/loss": [2, 4]}
    for key, expected in steps.items():
        assert [row["trainer/global_step"] for row in rows if key in row] == expected, key
    assert len(rows) == 4 + 2
