"""The program with the real wandb client, in situations that make it ask, wait or fail.

Each run is a process of its own, with a home folder of its own. Where a server is needed, it is a
stand-in on this machine (`fake_wandb.py`). The quick suite has one situation of each kind, here or with
the client in its own process (`tests/training/monitoring/test_wandb_client.py`); `make test-slow` has them
all.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.fake_wandb import Manners, fake_wandb
from tests.helpers.wandb_records import history, inspect
from tests.helpers.wandb_runs import KEY, Outcome, client_environment, train

MAX_SECONDS_ADDED = 25
"""Promise of docs/observing.md, for a machine without other work."""
MAX_SECONDS_OF_A_BUSY_MACHINE = 150
"""Bound for a busy machine."""

FOLDER = r"runs/kept/wandb/offline-run-\S+"
COMMANDS = rf"look: wandb leet {FOLDER}; upload: wandb sync {FOLDER}"
NO_KEY = r"wandb: offline \(No API key configured\. Use `wandb login` to log in\); " + COMMANDS
TIMED_OUT = (
    r"wandb: Timed out finishing run; upload what it kept: wandb sync runs/kept/wandb/run-\S+"
)


@dataclass(frozen=True)
class Situation:
    """Surroundings of the program, and a pattern of the `line` that it prints."""

    line: str
    environment: dict[str, str] = field(default_factory=dict)
    options: tuple[str, ...] = ()
    terminal: bool = False
    server: Manners | None = None
    """Behaviour of the server; None: no server can be reached."""
    files: dict[str, str] = field(default_factory=dict)
    """Files in the current folder."""
    installed: bool = True
    kept: bool = True
    """True if wandb has the run on disk."""
    dies: bool = False
    """True if wandb's process dies before it writes all rows."""


def with_key(line: str, **more: Any) -> Situation:
    return Situation(line, environment={"WANDB_API_KEY": KEY}, **more)


DEFAULT = {"no key, with a terminal": Situation(NO_KEY, terminal=True)}
SLOW = {
    "not installed, leftover folder wandb": Situation(
        r"wandb: not installed, metrics are in metrics\.jsonl \(pip install wandb\)",
        files={"wandb/latest-run/run.log": ""},
        installed=False,
        kept=False,
    ),
    "network silent midway": with_key(TIMED_OUT, server="silent midway"),
    "key, a server that never answers": with_key(
        rf"wandb: offline \(Timed out initializing run: .+\); {COMMANDS}", server="silent"
    ),
    "no key, option online, with a terminal": Situation(
        NO_KEY, options=("--logging.wandb.mode", "online"), terminal=True
    ),
    "key too short": Situation(
        rf"wandb: offline \(WANDB_API_KEY invalid: API key must have 40\+ characters, has 3\); {COMMANDS}",
        environment={"WANDB_API_KEY": "abc"},
        terminal=True,
    ),
    "key, no network": with_key(rf"wandb: offline \(.+\); {COMMANDS}"),
    "key, connection refused": with_key(
        rf"wandb: offline \(.+connection refused\); {COMMANDS}", server="refusing"
    ),
    "key and a server": with_key(
        r"wandb: online, http://127\.0\.0\.1:\d+/me/moe_ffn/runs/\w+", server="well"
    ),
    "network gone midway": with_key(TIMED_OUT, server="gone midway"),
    "wandb's process dies midway": with_key(
        # Which of the two depends on whether the end of the run or the end of the process is first.
        r"wandb: (HandleAbandonedError|Connection lost); "
        r"upload what it kept: wandb sync runs/kept/wandb/run-\S+",
        server="nonsense midway",
        dies=True,
    ),
    "WANDB_MODE disabled": Situation(
        "wandb: off", environment={"WANDB_MODE": "disabled"}, kept=False
    ),
    "WANDB_MODE disabled, option offline": Situation(
        rf"wandb: offline; {COMMANDS}",
        environment={"WANDB_MODE": "disabled"},
        options=("--logging.wandb.mode", "offline"),
    ),
    "home unwritable": Situation(NO_KEY, environment={"HOME": "/proc/none"}),
}


@pytest.fixture(scope="session")
def tiny_config(tiny_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model of experts, and wandb as it is where nobody has set it."""
    text = tiny_yaml.read_text().replace(", wandb: {mode: disabled}", "")
    path = tmp_path_factory.mktemp("wandb") / "tiny.yaml"
    path.write_text(
        text.replace("num_layers: 2", "num_layers: 2, ffn: {type: moe, num_experts: 4}")
    )
    return path


@pytest.fixture(scope="session")
def measure_without(
    tiny_config: Path, tmp_path_factory: pytest.TempPathFactory
) -> Callable[[], float]:
    """Seconds of the same run where wandb is off."""

    def measure() -> float:
        where = tmp_path_factory.mktemp("without")
        outcome = train(tiny_config, where, "--logging.wandb.mode", "disabled")
        assert outcome.code == 0, outcome.printed
        assert "\nwandb: off\n" in outcome.printed
        assert not (outcome.folder / "wandb").exists()
        return outcome.seconds

    return measure


@pytest.fixture(scope="session")
def seconds_without(measure_without: Callable[[], float]) -> float:
    return measure_without()


@pytest.fixture
def run_in(tiny_config: Path, tmp_path: Path) -> Callable[[Situation], Outcome]:
    def run(situation: Situation) -> Outcome:
        for name, text in situation.files.items():
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text(text)
            (tmp_path / name).chmod(0o600)  # as a netrc has to be
        with fake_wandb(situation.server) if situation.server else nullcontext() as server:
            address = {"WANDB_BASE_URL": server.url} if server else {}
            return train(
                tiny_config,
                tmp_path,
                *situation.options,
                environment={**address, **situation.environment},
                terminal=situation.terminal,
                installed=situation.installed,
            )

    return run


@pytest.mark.parametrize(
    ("situation", "max_added"),
    [pytest.param(s, MAX_SECONDS_OF_A_BUSY_MACHINE, id=name) for name, s in DEFAULT.items()]
    + [
        pytest.param(s, MAX_SECONDS_ADDED, id=f"{name}, in time", marks=pytest.mark.slow)
        for name, s in (DEFAULT | SLOW).items()
    ],
)
def test_a_run_ends_as_if_there_were_no_wandb(
    situation: Situation,
    max_added: float,
    run_in: Callable[[Situation], Outcome],
    seconds_without: float,
    measure_without: Callable[[], float],
) -> None:
    outcome = run_in(situation)

    added = outcome.seconds - seconds_without
    if added > max_added:  # the machine may have become busier since
        added = outcome.seconds - measure_without()
    print(f"{added:+.1f} s\n{outcome.printed}")
    assert outcome.code == 0
    assert added <= max_added
    assert not re.search(r"enter your choice|paste an api key|/authorize", outcome.printed, re.I)
    lines = [line for line in outcome.printed.splitlines() if line.startswith("wandb: ")]
    assert any(re.fullmatch(situation.line, line) for line in lines), lines
    assert [row["step"] for row in outcome.rows] == [1, 2, 2]
    if situation.dies:
        assert outcome.wandb_folders()
    elif situation.kept:
        _assert_read_back(outcome)
    else:
        assert not (outcome.folder / "wandb").exists()


def _assert_read_back(outcome: Outcome) -> None:
    """wandb's own tool finds the facts, and every key and value of every row of `metrics.jsonl`."""
    (folder,) = outcome.wandb_folders()
    records = inspect(folder, client_environment(outcome.home))
    (run,) = [record["run"] for record in records if record["type"] == "run"]
    assert run["display_name"] == "kept"
    assert run["tags"] == ["moe"]
    facts = run["config"]["update"]
    assert facts["ffn_type"] == "moe"
    assert 0 < facts["num_active_params"] < facts["num_params"]
    assert facts["model"]["ffn"]["num_experts"] == 4
    assert {"corpus_sha256", "git_revision"} <= facts.keys()
    # Charts run over optimizer steps, not over wandb's count of rows.
    assert "trainer/global_step" in str([r for r in records if r["type"] == "metric"])

    rows = history(records)
    assert [row["trainer/global_step"] for row in rows] == [1, 2, 2]
    assert rows[-1].pop("routing/load_heatmap")["_type"] == "plotly-file"
    for row, written in zip(rows, outcome.rows, strict=True):
        columns = _columns(row)
        assert columns.pop("trainer/global_step") == written.pop("step")
        assert columns == pytest.approx(written, nan_ok=True)


def _columns(row: dict[str, Any]) -> dict[str, float]:
    """A histogram as the columns that the table has of it."""
    flat: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            assert value["_type"] == "histogram"
            assert value["bins"] == list(range(len(value["values"]) + 1))
            flat |= {f"{key}/expert_{e:02d}": v for e, v in enumerate(value["values"])}
        else:
            flat[key] = value
    return flat


def test_without_wandb_metrics_go_to_the_log(
    run_train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)

    run = run_train(tmp_path, "--logging.wandb.mode", "auto", "--trainer.max_steps", "2")

    assert run.code == 0
    assert "wandb: not installed, metrics are in metrics.jsonl (pip install wandb)" in run.stdout
    assert "train/loss" in run.columns
    assert not (run.folder / "wandb").exists()
