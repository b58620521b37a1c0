"""wandb never stands in the way: what becomes of it without a key, a network or a package."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch.loggers
import pytest

from moe_ffn.training.config import WandbConfig
from moe_ffn.training.loggers import wandb_logger


class FakeWandb:
    """The part of wandb that is used, with what the world around it would say."""

    class Error(Exception):
        pass

    def __init__(self, has_key: bool = False, failing: tuple[str, ...] = ()) -> None:
        self.has_key = has_key
        self.failing = failing
        self.started: list[dict[str, Any]] = []

    def setup(self, settings: Any) -> None:
        pass

    def Settings(self, **values: Any) -> dict[str, Any]:
        return values

    def login(self, prompt: bool, verify: bool) -> bool:
        assert not prompt, "nobody may be there to answer"
        assert not verify, "there may be no network"
        return self.has_key

    def init(self, **arguments: Any) -> Any:
        self.started.append(arguments)
        if arguments["mode"] in self.failing:
            raise self.Error("no connection\nand more lines about it")
        folder = Path(arguments["dir"]) / "wandb" / "offline-run-1" / "files"
        return SimpleNamespace(
            dir=str(folder), url="https://wandb.example/run", define_metric=lambda *a, **k: None
        )


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """`start(fake, WandbConfig(...))`: the logger, the line, and the modes that were tried."""
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.setattr(lightning.pytorch.loggers, "WandbLogger", SimpleNamespace)
    monkeypatch.chdir(tmp_path)

    def run(fake: FakeWandb, config: WandbConfig | None = None) -> tuple[Any, str, list[str]]:
        monkeypatch.setitem(sys.modules, "wandb", fake)
        run_dir = tmp_path / "runs" / "mine"
        logger, line = wandb_logger(config or WandbConfig(), run_dir, ["moe"], {"seed": 0})
        return logger, line, [arguments["mode"] for arguments in fake.started]

    return run


def test_without_a_key_the_run_is_kept_offline(start: Any) -> None:
    logger, line, modes = start(FakeWandb(has_key=False))

    assert logger is not None
    assert modes == ["offline"]
    assert line == "wandb: offline; to upload: wandb sync runs/mine/wandb/offline-run-1"


def test_with_a_key_the_run_is_online(start: Any) -> None:
    logger, line, modes = start(FakeWandb(has_key=True))

    assert logger is not None
    assert modes == ["online"]
    assert line == "wandb: online, https://wandb.example/run"


@pytest.mark.parametrize("mode", ["auto", "online"])
def test_with_a_key_and_no_network_the_run_is_kept_offline(
    start: Any, capsys: pytest.CaptureFixture[str], mode: Any
) -> None:
    logger, line, modes = start(
        FakeWandb(has_key=True, failing=("online",)), WandbConfig(mode=mode)
    )

    assert logger is not None
    assert modes == ["online", "offline"]
    assert line.startswith("wandb: offline; ")
    assert capsys.readouterr().err == "wandb: online failed: no connection\n"


def test_where_nothing_works_the_run_goes_on_without(
    start: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    logger, line, modes = start(FakeWandb(has_key=True, failing=("online", "offline")))

    assert logger is None
    assert modes == ["online", "offline"]
    assert line == "wandb: off, metrics are in metrics.csv"
    assert len(capsys.readouterr().err.splitlines()) == 2


@pytest.mark.parametrize("mode", ["offline", "disabled"])
def test_the_option_wins_over_the_environment(
    start: Any, monkeypatch: pytest.MonkeyPatch, mode: Any
) -> None:
    fake = FakeWandb(has_key=True)
    monkeypatch.setenv("WANDB_MODE", "online")

    _, _, modes = start(fake, WandbConfig(mode=mode))

    assert modes == ([] if mode == "disabled" else ["offline"])


@pytest.mark.parametrize(
    ("environment", "modes"),
    [
        ("offline", ["offline"]),
        ("dryrun", ["offline"]),
        ("online", ["online"]),
        ("run", ["online"]),
        ("disabled", []),
        ("", ["online"]),
    ],
)
def test_auto_follows_the_environment_and_empty_is_unset(
    start: Any, monkeypatch: pytest.MonkeyPatch, environment: str, modes: list[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", environment)

    assert start(FakeWandb(has_key=True))[2] == modes
    assert os.environ.get("WANDB_MODE") != "", "wandb itself refuses the empty string"


def test_an_environment_that_wandb_would_refuse_is_ignored_aloud(
    start: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "sometimes")

    assert start(FakeWandb(has_key=False))[2] == ["offline"]
    assert "WANDB_MODE" not in os.environ
    assert capsys.readouterr().err == (
        "wandb: WANDB_MODE 'sometimes' is ignored; known: online, offline, disabled, shared, run, "
        "dryrun\n"
    )


def test_a_malformed_key_counts_as_none(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeWandb()
    monkeypatch.setattr(fake, "login", lambda **_: (_ for _ in ()).throw(ValueError("40 chars")))

    assert start(fake)[2] == ["offline"]


def test_a_leftover_wandb_folder_is_no_package(start: Any) -> None:
    # `import wandb` beside a folder `./wandb` gives a namespace package with nothing in it.
    logger, line, _ = start(SimpleNamespace(started=[]))

    assert logger is None
    assert line == "wandb: not installed, metrics are in metrics.csv (pip install wandb)"


def test_the_run_is_named_tagged_and_described(start: Any) -> None:
    fake = FakeWandb()
    start(fake, WandbConfig(project="mine", entity="us"))

    (arguments,) = fake.started
    assert arguments["project"] == "mine"
    assert arguments["entity"] == "us"
    assert arguments["name"] == "mine"
    assert arguments["tags"] == ["moe"]
    assert arguments["config"] == {"seed": 0}
    # The default of 90 seconds is what makes a run without a network hang.
    assert arguments["settings"]["init_timeout"] <= 10
