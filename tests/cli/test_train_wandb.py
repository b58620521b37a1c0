"""Training with the real wandb client, in situations that make it ask, wait or fail.

Each of the slow runs is a process with a home folder of its own. `fake_wandb.py` stands in for the server.
`tests/training/monitoring/test_wandb.py` has the client in this process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from moe_ffn.runs.rows import flat
from moe_ffn.training.monitoring.json_lines import Row, read_lines
from tests.helpers.fake_wandb import KEY, Manners, history, inspect, wandb_server

ROOT = Path(__file__).parents[2]
MAX_SECONDS_ADDED, MAX_SECONDS_ON_A_BUSY_MACHINE = 25, 150
"""Limits of the time that wandb adds to a run; docs/howto/observe.md has the first."""

FOLDER = r"runs/kept/wandb/offline-run-\S+"
COMMANDS = rf"view: wandb leet {FOLDER}; upload: wandb sync {FOLDER}"
NO_KEY = r"wandb: offline \(No API key configured\. Use `wandb login` to log in\); " + COMMANDS
TIMED_OUT = (
    r"wandb: Timed out finishing run; upload the rest with: wandb sync runs/kept/wandb/run-\S+"
)
OPTIONS = (
    *("--run.name", "kept", "--trainer.max_steps", "2", "--logging.every_n_steps", "1"),
    *("--logging.churn_every_n_steps", "1", "--model.ffn", "{type: moe, num_experts: 4}"),
)
IN_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
"""Program that runs its arguments in a pseudo-terminal without input."""


@dataclass(frozen=True)
class UseCase:
    """The surroundings of the program, and the `line` (a pattern) with which it answers."""

    line: str
    environment: dict[str, str] = field(default_factory=dict)
    server: Manners | None = None
    """Behaviour of the server; None if wandb's own server cannot be reached."""
    kept: bool = True
    """True if wandb has the run on disk."""


def with_key(line: str, server: Manners | None = None) -> UseCase:
    return UseCase(line, environment={"WANDB_API_KEY": KEY}, server=server)


SITUATIONS = {
    "no key": UseCase(NO_KEY),
    "network silent midway": with_key(TIMED_OUT, "silent midway"),
    "network gone midway": with_key(TIMED_OUT, "gone midway"),
    "a server that never answers": with_key(
        rf"wandb: offline \(Timed out initializing run: .+\); {COMMANDS}", "silent"
    ),
    "key, connection refused": with_key(
        rf"wandb: offline \(.+connection refused\); {COMMANDS}", "refusing"
    ),
    "key of no account": with_key(
        rf"wandb: offline \(user is not logged in\); {COMMANDS}", "forbidding"
    ),
    "key and a server": with_key(
        r"wandb: online, http://127\.0\.0\.1:\d+/me/moe_ffn/runs/\w+", "well"
    ),
    "WANDB_MODE disabled": UseCase("wandb: off", {"WANDB_MODE": "disabled"}, kept=False),
    "a setting that wandb rejects": UseCase(
        r"wandb: off \(base_url: Input should be a valid URL.*\), metrics are in metrics\.jsonl",
        environment={"WANDB_BASE_URL": "not a url"},
        kept=False,
    ),
    "home not writable": UseCase(NO_KEY, environment={"HOME": "/proc/none"}),
}


def train(config: Path, where: Path, situation: UseCase) -> tuple[str, float]:
    """Train two steps in a terminal; returns the printed text and the seconds."""
    text = config.read_text().replace(", wandb: {mode: disabled}", "")
    (where / "tiny.yaml").write_text(text)
    home = where / "home of the client"
    home.mkdir()
    command = [
        *(sys.executable, "-c", IN_A_TERMINAL, sys.executable, "-m", "experiments.train"),
        *("--config", str(where / "tiny.yaml"), "--data.cache_dir", str(where / "cache"), *OPTIONS),
    ]
    start = time.perf_counter()
    with wandb_server(situation.server) if situation.server else nullcontext() as server:
        address = {"WANDB_BASE_URL": server.url} if server else {}
        done = subprocess.run(
            command,
            cwd=where,
            env={**client_environment(home), **address, **situation.environment},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
            check=False,
        )
    assert done.returncode == 0, done.stdout
    return done.stdout, time.perf_counter() - start


@pytest.fixture(scope="module")
def baseline_seconds(tiny_yaml: Path, tmp_path_factory: pytest.TempPathFactory) -> float:
    """Seconds of the same run without wandb."""
    return train(tiny_yaml, tmp_path_factory.mktemp("without"), SITUATIONS["WANDB_MODE disabled"])[
        1
    ]


@pytest.mark.slow
@pytest.mark.parametrize("situation", SITUATIONS.values(), ids=SITUATIONS)
def test_a_run_ends_as_if_there_were_no_wandb(
    tiny_yaml: Path, tmp_path: Path, request: pytest.FixtureRequest, situation: UseCase
) -> None:
    printed, seconds = train(tiny_yaml, tmp_path, situation)

    is_busy = os.getloadavg()[0] > (os.cpu_count() or 1)
    limit = MAX_SECONDS_ON_A_BUSY_MACHINE if is_busy else MAX_SECONDS_ADDED
    # Without a server to wait for, the whole run takes less than what wandb may add.
    baseline = request.getfixturevalue("baseline_seconds") if situation.server else 0.0
    assert seconds - baseline <= limit
    assert not re.search(r"enter your choice|paste an api key|/authorize", printed, re.I)
    lines = [line for line in printed.splitlines() if line.startswith("wandb: ")]
    assert any(re.fullmatch(situation.line, line) for line in lines), lines
    check_kept(tmp_path / "runs" / "kept", tmp_path / "home of the client", situation.kept)


def test_a_run_without_a_key_is_kept_on_disk(
    run_train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wandb = pytest.importorskip("wandb")
    home = tmp_path / "home of the client"
    for name, value in client_environment(home).items():
        monkeypatch.setenv(name, value)
    wandb.teardown()
    run = run_train(tmp_path, *OPTIONS, "--logging.wandb.mode", "auto")
    wandb.teardown()

    assert run.code == 0, run.stderr
    assert re.search(f"^{NO_KEY}$", run.stdout, re.MULTILINE), run.stdout
    check_kept(run.folder, home, is_kept=True)


def client_environment(home: Path) -> dict[str, str]:
    """The environment of this process, without any settings for wandb."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and k != "NETRC"}
    return {
        **kept,
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
    }


def check_kept(folder: Path, home: Path, is_kept: bool) -> None:
    """wandb's own tool finds the facts, and every key and value of every row of `metrics.jsonl`."""
    own_rows = read_lines(folder / "metrics.jsonl", Row)
    written = [{"step": row.step, **flat(row.values)} for row in own_rows]
    assert [row["step"] for row in written] == [1, 2, 2]
    if not is_kept:
        assert not (folder / "wandb").exists()
        return
    (kept,) = (folder / "wandb").glob("*run-*")
    records = inspect(kept, client_environment(home))
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
    assert rows[-1].pop("routing/load_heatmap")["_type"] == "plotly-file"
    for row, own in zip(rows, written, strict=True):
        columns = columns_of(row)
        assert columns.pop("trainer/global_step") == own.pop("step")
        assert columns == pytest.approx(own, nan_ok=True)


def columns_of(row: dict[str, Any]) -> dict[str, float]:
    """The row with the columns of the table in place of its histograms."""
    columns: dict[str, float] = {}
    for key, value in row.items():
        if isinstance(value, dict):
            assert value["_type"] == "histogram"
            assert value["bins"] == list(range(len(value["values"]) + 1))
            columns |= {f"{key}/expert_{e:02d}": v for e, v in enumerate(value["values"])}
        else:
            columns[key] = value
    return columns


def test_without_wandb_metrics_go_to_the_log(
    run_train: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "wandb", None)
    run = run_train(tmp_path, "--logging.wandb.mode", "auto", "--trainer.max_steps", "2")
    assert run.code == 0
    assert "wandb: not installed, metrics are in metrics.jsonl (pip install wandb)" in run.stdout
    assert "train/loss" in run.columns
    assert not (run.folder / "wandb").exists()
