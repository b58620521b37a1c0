"""Loggers of a run: `metrics.jsonl`, `alarms.jsonl`, and Weights & Biases.

Without an account or a network, wandb logs to disk, offline. An exception in wandb never ends the training,
and the timeouts below limit how long training waits for wandb.
"""

from __future__ import annotations

import logging
import math
import os
import re
import shlex
import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger, WandbLogger
from lightning.pytorch.utilities import rank_zero_only
from plotly.graph_objects import Figure
from pydantic import ValidationError

from moe_ffn.config.errors import explain, first_line
from moe_ffn.metrics.plotting import LOAD_OPTIONS, heat_figure
from moe_ffn.training.config import WandbConfig
from moe_ffn.training.monitoring.alarms import summarize_alarms
from moe_ffn.training.monitoring.json_lines import STEP_KEY, Alarm, JsonLines
from moe_ffn.training.recovery import Checkpointed

log = logging.getLogger(__name__)

INIT_TIMEOUT_SECONDS = 8
"""Seconds to wait for the server to accept a run; without a network, wandb's default of 90 seems a hang."""
FINISH_TIMEOUT_SECONDS = 10
"""Seconds to wait for the upload of the last rows; by default wandb waits forever."""
SERVICE_TIMEOUT_SECONDS = 10
"""Seconds to wait for the start of wandb's background process, which writes and uploads."""

_MAX_ALERT_TITLE = 63

_RUN_FOLDER = re.compile(r"(?:offline-)?run-(\d{8}_\d{6})-(.+)")

MAX_BINS = 512
"""Largest number of bins in a wandb histogram."""

WANDB_STEP = "trainer/global_step"
"""Key under which Lightning's logger writes the optimizer step."""

LOAD_FIGURE = "routing/load_heatmap"
"""Key of the heat map of each validation; wandb shows a slider over the steps."""


class MetricsFile(Logger):
    """Writes `metrics.jsonl`: one line for every row of metrics, immediately."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = JsonLines(path, is_synced=False)

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Do nothing, since the run's `config.yaml` holds the options."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a row."""
        self.file.add([{STEP_KEY: step, **metrics}])

    @rank_zero_only
    def save(self) -> None:
        """Sync every row to the disk, or report the failure."""
        self.file.sync()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()


class WandbRun(WandbLogger):
    """Lightning logger for a run of `wandb.init`; it is `online` if wandb uploads rows during training."""

    def __init__(self, run: Any, online: bool) -> None:
        super().__init__(experiment=run)
        self.online = online
        self._failed = False

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Log a row, converted by `wandb_row`."""
        with self._warning_once("metrics go only to metrics.jsonl"):
            super().log_metrics(wandb_row(metrics), step)

    def alert(self, title: str, text: str) -> None:
        """Send the user a message through wandb, if the run is online."""
        if self.online:
            with self._warning_once("metrics go only to metrics.jsonl"):
                self.experiment.alert(title[:_MAX_ALERT_TITLE], text)

    def finish(self, status: str) -> None:
        """End the run. Rows not uploaded in time stay on disk; a warning shows how to upload them."""
        self._failed = False
        with self._warning_once(f"upload the rest with: {wandb_command('sync', self.experiment)}"):
            self.experiment.finish(exit_code=0 if status == "success" else 1)

    @contextmanager
    def _warning_once(self, remedy: str) -> Iterator[None]:
        """Catch every exception of wandb, and print a warning for the first."""
        try:
            yield
        # Of any type: wandb's process may have died, or its disk may be full.
        except Exception as error:
            if not self._failed:
                log.warning("wandb: %s; %s", _reason(error), remedy)
            self._failed = True


def wandb_logger(
    config: WandbConfig, run_dir: Path, tags: list[str], facts: Mapping[str, Any]
) -> tuple[WandbRun | None, str]:
    """Return a logger, or None if wandb is off, and one line about the state of wandb.

    If `run_dir` has a wandb run already, that run is resumed. Its config gets the `facts`.
    """
    environment = os.environ.pop("WANDB_MODE", "")  # wandb itself rejects an empty value
    mode = {"dryrun": "offline"}.get(environment, environment)
    mode = mode if config.mode == "auto" else config.mode
    if mode == "disabled":
        return None, "wandb: off"
    wandb = _import_wandb()
    if wandb is None:
        return None, "wandb: not installed, metrics are in metrics.jsonl (pip install wandb)"
    earlier = _wandb_folders(run_dir)
    earlier_id = max(earlier.values())[1] if earlier else None

    def start(mode: str) -> Any:
        # With these settings wandb raises an error if there is no API key, instead of asking for one.
        service = {"show_info": False, "x_service_wait": SERVICE_TIMEOUT_SECONDS}
        wandb.setup(wandb.Settings(mode=mode, **service))
        run = wandb.init(
            mode=mode,
            project=config.project,
            entity=config.entity,
            group=config.group,
            name=run_dir.name,
            id=earlier_id,
            resume=None if earlier_id is None else "allow",
            dir=str(run_dir),
            tags=tags,
            config=dict(facts),
            settings=wandb.Settings(
                init_timeout=INIT_TIMEOUT_SECONDS,
                finish_timeout=FINISH_TIMEOUT_SECONDS,
                finish_timeout_raises=True,
                silent=True,
                console="off",
                x_disable_stats=True,
            ),
        )
        # Plot over optimizer steps: wandb's own step counts rows, and restarts at 0 when offline.
        run.define_metric(WANDB_STEP)
        run.define_metric("*", step_metric=WANDB_STEP)
        return run

    why_offline = ""
    if mode != "offline":
        try:
            run = start("online")
            return WandbRun(run, online=True), f"wandb: online, {run.url}"
        except Exception as error:  # of any type: training does not depend on wandb
            why_offline = f" ({_reason(error)})"
            # The failed attempt has left a folder without rows.
            for folder in _wandb_folders(run_dir).keys() - earlier.keys():
                shutil.rmtree(folder, ignore_errors=True)
    try:
        run = start("offline")
    except Exception as error:
        return None, f"wandb: off ({_reason(error)}), metrics are in metrics.jsonl"
    view, upload = wandb_command("leet", run), wandb_command("sync", run)
    line = f"wandb: offline{why_offline}; view: {view}; upload: {upload}"
    return WandbRun(run, online=False), line


def _wandb_folders(run_dir: Path) -> dict[Path, tuple[str, str]]:
    """Return wandb folder -> (time, id) from its name, for all folders of this run."""
    folders = (run_dir / "wandb").glob("*run-*")
    matches = {folder: _RUN_FOLDER.fullmatch(folder.name) for folder in folders}
    return {folder: (match[1], match[2]) for folder, match in matches.items() if match}


def _reason(error: Exception) -> str:
    """Return an error of wandb as one line without a full stop."""
    text = explain(error)[0] if isinstance(error, ValidationError) else first_line(error)
    return text.rstrip(".")


def wandb_command(command: str, run: Any) -> str:
    """Return a command for the current folder, such as `wandb sync runs/mine/wandb/run-1`."""
    folder, here = Path(run.dir).parent, Path.cwd()
    shown = folder.relative_to(here) if folder.is_relative_to(here) else folder
    return f"wandb {command} {shlex.quote(str(shown))}"


def _import_wandb() -> Any:
    """Return the wandb package; None if it is not installed (a `./wandb` folder of logs does not count)."""
    # Error reports would delay the exit by 20 seconds if the server does not answer.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    # A key from a file may end in a newline, which wandb rejects.
    if "WANDB_API_KEY" in os.environ:
        os.environ["WANDB_API_KEY"] = os.environ["WANDB_API_KEY"].strip()
    try:
        import wandb
    except ImportError:
        return None
    return wandb if hasattr(wandb, "init") else None


def wandb_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """Convert each list in a row to a histogram over experts, and add a heat map of the validation load.

    This gives one key per layer instead of one per expert; a wandb project should have fewer than 10,000.
    """
    import wandb

    values, loads = dict(row), {}
    for key, value in row.items():
        if isinstance(value, list):
            num_bins = min(len(value), MAX_BINS)
            heights = np.nan_to_num(np.asarray(value, dtype=float))
            bins = np.histogram(range(len(value)), num_bins, (0, len(value)), weights=heights)
            values[key] = wandb.Histogram(np_histogram=bins)
            if layer := re.fullmatch("validation/routing/(.+)/load", key):
                loads[layer[1]] = value
    if loads:
        values[LOAD_FIGURE] = wandb.Plotly(load_heatmap(loads))
    return values


def load_heatmap(loads: Mapping[str, Sequence[float]]) -> Figure:
    """Return a heat map of load over the even share; rows are layers, columns are experts.

    `loads` maps a layer to the fraction of its pairs on each expert. Layers may have different numbers of
    experts. The row of a layer that no token reached is blank, since its loads are not finite.
    """
    num_columns = max(map(len, loads.values()))
    # Plain lists, since plotly packs arrays into a format that older viewers cannot read.
    ratios = [
        [share * len(load) if math.isfinite(share) else None for share in load]
        + [None] * (num_columns - len(load))
        for load in loads.values()
    ]
    return heat_figure(
        range(num_columns),
        list(loads),
        ratios,
        ("expert", "layer"),
        title="Load of each expert",
        note="",
        hover="%{y}, expert %{x}<br>%{z:.2f} times the even share",
        hoverongaps=False,
        xgap=1,
        ygap=1,
        **LOAD_OPTIONS,
    )


def alert(loggers: Iterable[Logger], title: str, text: str) -> None:
    """Send a message through wandb if it is online. Does not raise and does not wait for the network."""
    for logger in loggers:
        if isinstance(logger, WandbRun):
            logger.alert(title, text)


class AlarmLog(Checkpointed):
    """Writes alarms to standard error, to wandb, and as JSON lines to `path`."""

    in_checkpoint = ("num_alarms",)

    def __init__(self, path: Path) -> None:
        self.num_alarms = 0
        self.file = JsonLines(path)

    def report(self, alarms: Sequence[Alarm], loggers: Sequence[Logger]) -> None:
        """Print one line for each kind of alarm; write every alarm to the file."""
        self.num_alarms += len(alarms)
        for first, sentence in summarize_alarms(alarms):
            log.warning("alarm: %s", sentence)
            title = first.kind.replace("_", " ")
            # wandb suppresses an alert with the same title as a recent one.
            title = title if first.layer is None else f"{title}, {first.layer}"
            alert(loggers, title, sentence)
        self.file.add(alarm.model_dump() for alarm in alarms)


def close(loggers: Iterable[Logger], status: str = "success") -> None:
    """Write pending rows and end the wandb run, as `success` or `failed`, so that another run can start."""
    with ExitStack() as stack:  # close every logger, even if another fails because the disk is full
        for logger in loggers:
            if isinstance(logger, WandbRun):
                stack.callback(logger.finish, status)
            stack.callback(logger.finalize, status)
