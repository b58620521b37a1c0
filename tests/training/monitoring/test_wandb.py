"""wandb without a key, a network or a package; its rows and pictures; a resumed run.

Whole runs of the program with the real client: `tests/cli/test_train_wandb.py`.
"""

from __future__ import annotations

import json
import math
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from moe_ffn.training.config import WandbConfig
from moe_ffn.training.monitoring.loggers import WandbRun, load_heatmap, wandb_logger, wandb_row
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
def test_a_run_is_online_if_possible_or_gives_the_reason(
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
    assert "WANDB_MODE" not in os.environ, "wandb itself rejects the empty string"


def test_a_key_may_end_in_a_newline(start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_API_KEY", "a key from a file\n")
    start(StubWandb())
    assert os.environ["WANDB_API_KEY"] == "a key from a file"


def test_a_leftover_wandb_folder_is_no_package(start: Any) -> None:
    # `import wandb` next to a folder `./wandb` gives a namespace package with nothing in it.
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


def test_a_list_is_one_histogram_with_a_bin_per_expert() -> None:
    row = wandb_row({"train/loss": 2.5, "routing/layer_03/load": [0.25, 0.75, 0.0]})

    assert row.keys() == {"train/loss", "routing/layer_03/load"}
    assert row["train/loss"] == 2.5
    histogram = row["routing/layer_03/load"]
    assert histogram.histogram == [0.25, 0.75, 0.0]
    assert histogram.bins == [0, 1, 2, 3]


def test_more_experts_than_wandb_has_bins_for_share_them() -> None:
    histogram = wandb_row({"load": [1.0] * 1024})["load"]
    assert histogram.histogram == [2.0] * 512
    assert histogram.bins[-1] == 1024


def test_a_share_that_does_not_exist_is_drawn_as_none() -> None:
    assert wandb_row({"load": [float("nan"), 1.0]})["load"].histogram == [0.0, 1.0]


VALIDATION = {
    "validation/loss": 2.0,
    "validation/routing/layer_00/load": [0.25, 0.75],
    "validation/routing/layer_01/inner/load": [1.0],
}


def test_a_validation_adds_the_picture_of_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr("wandb.Plotly", lambda figure: drawn.append(figure))
    row = wandb_row(VALIDATION)
    assert row.keys() == {*VALIDATION, "routing/load_heatmap"}
    assert list(drawn[0].data[0].y) == ["layer_00", "layer_01/inner"]


# Two experts at 1/4 and 3/4 of the pairs get 0.5 and 1.5 times the even share of 1/2; of four
# experts at 1/4, each gets what is even.
RAGGED = {"layer_00": [0.25, 0.75], "layer_03/inner": [0.25, 0.25, 0.25, 0.25]}


def plain(loads: dict[str, list[float]]) -> dict:
    """The figure as a viewer gets it."""
    return json.loads(load_heatmap(loads).to_json() or "")


def test_the_picture_has_a_row_for_each_layer_and_a_fixed_scale() -> None:
    figure = plain(RAGGED)
    (heatmap,) = figure["data"]

    assert heatmap["type"] == "heatmap"
    assert heatmap["y"] == ["layer_00", "layer_03/inner"]
    assert heatmap["x"] == [0, 1, 2, 3]
    assert heatmap["z"] == [[0.5, 1.5, None, None], [1.0, 1.0, 1.0, 1.0]]
    assert figure["layout"]["xaxis"]["title"]["text"] == "expert"
    assert figure["layout"]["yaxis"]["title"]["text"] == "layer"
    assert figure["layout"]["yaxis"]["autorange"] == "reversed", "the first layer stands on top"
    assert heatmap["colorbar"]["title"]["text"] == "load, times the even share 1/E"
    assert (heatmap["zmin"], heatmap["zmax"]) == (0, 4)
    assert heatmap["colorscale"][2] == [0.25, "#f7f7f5"], "white is even"


def test_a_layer_that_no_token_reached_is_blank() -> None:
    (heatmap,) = plain({"layer_00": [math.nan, math.nan], "layer_01": [1.0, 0.0]})["data"]
    assert heatmap["z"] == [[None, None], [2.0, 0.0]]


def test_wandb_stores_plain_numbers_and_little_else() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import wandb
    figure = load_heatmap({f"layer_{layer:02d}": [1 / 64] * 64 for layer in range(4)})

    stored = Path(wandb.Plotly(figure)._path or "").read_text()

    assert json.loads(stored)["data"][0]["z"] == [[1.0] * 64] * 4
    assert "bdata" not in stored, "a packed array, which older viewers cannot read"
    assert len(stored) < 5_000
