"""A run at wandb that never stands in the way of training.

Without an account or a network it is kept offline, on disk. Whatever wandb raises ends wandb, not the
run; and nothing of it is waited for longer than the constants below.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import shlex
import shutil
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger, WandbLogger
from plotly.graph_objects import Figure
from pydantic import ValidationError

from moe_ffn.errors import explain, first_line
from moe_ffn.training.config import WandbConfig

INIT_TIMEOUT_SECONDS = 8
"""How long the server may take to accept a run; wandb's own 90 make a run without a network hang."""
FINISH_TIMEOUT_SECONDS = 10
"""How long the last rows may take to be uploaded; wandb itself would wait without end."""
SERVICE_TIMEOUT_SECONDS = 10
"""How long wandb's own process, which writes and uploads, may take to start."""

_MAX_ALERT_TITLE = 63

_RUN_FOLDER = re.compile(r"(?:offline-)?run-(\d{8}_\d{6})-(.+)")

_MODES = {
    "online": "online",
    "offline": "offline",
    "disabled": "disabled",
    "shared": "online",
    "run": "online",
    "dryrun": "offline",
}
"""What WANDB_MODE may say, and what it means."""


class WandbRun(WandbLogger):
    """Lightning's logger for a run that has been started.

    Args:
        run: what `wandb.init` returned.
        online: whether rows are uploaded as they come.
    """

    def __init__(self, run: Any, online: bool) -> None:
        super().__init__(experiment=run)
        self.online = online
        self._failed = False

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """A row, in the form of `wandb_row`."""
        with self._harmless("metrics go to metrics.jsonl alone"):
            super().log_metrics(wandb_row(metrics), step)

    def alert(self, title: str, text: str) -> None:
        """Have wandb send its user a message, where it is online."""
        if self.online:
            with self._harmless("metrics go to metrics.jsonl alone"):
                self.experiment.alert(title[:_MAX_ALERT_TITLE], text)

    def finish(self, status: str) -> None:
        """End the run; what was not uploaded in time stays on disk, which a line says.

        Args:
            status: `success` or `failed`.
        """
        self._failed = False
        with self._harmless(f"upload what it kept: {sync_command(self.experiment)}"):
            self.experiment.finish(exit_code=0 if status == "success" else 1)

    @contextmanager
    def _harmless(self, remedy: str) -> Iterator[None]:
        """Nothing that wandb raises passes; one line says so the first time."""
        try:
            yield
        except Exception as error:  # its process may have died, its disk be full
            if not self._failed:
                print(f"wandb: {_reason(error)}; {remedy}", file=sys.stderr)
            self._failed = True


def wandb_logger(
    config: WandbConfig, run_dir: Path, tags: list[str], facts: Mapping[str, Any]
) -> tuple[WandbRun | None, str]:
    """A started run, or None, and one line that says what a person can do with it.

    The run that wandb kept in `run_dir` before, if any, goes on under its id.

    Args:
        facts: what is stored as the run's config: the resolved options, revision, parameter counts.
    """
    mode = _requested_mode(config)
    if mode == "disabled":
        return None, "wandb: off"
    try:
        str(run_dir.absolute()).encode()
    except UnicodeEncodeError:  # on which its own log fails, with a traceback for each line
        return None, "wandb: off (the run's path is not UTF-8), metrics are in metrics.jsonl"
    wandb = _import_wandb()
    if wandb is None:
        return None, "wandb: not installed, metrics are in metrics.jsonl (pip install wandb)"
    kept = _kept(run_dir)
    earlier_id = max(kept.values())[1] if kept else None
    start = partial(_start, wandb, config, run_dir, tags, facts, earlier_id)
    why_offline = ""
    if mode != "offline":
        try:
            run = start("online")
            return WandbRun(run, online=True), f"wandb: online, {run.url}"
        except Exception as error:  # of whatever kind: it is only wandb
            why_offline = f" ({_reason(error)})"
            for folder in _kept(run_dir).keys() - kept.keys():  # of the attempt, with no rows
                shutil.rmtree(folder, ignore_errors=True)
    try:
        run = start("offline")
    except Exception as error:
        return None, f"wandb: off ({_reason(error)}), metrics are in metrics.jsonl"
    look = f"{_command()} leet {_folder(run)}"
    line = f"wandb: offline{why_offline}; look: {look}; upload: {sync_command(run)}"
    return WandbRun(run, online=False), line


def _start(
    wandb: Any,
    config: WandbConfig,
    run_dir: Path,
    tags: list[str],
    facts: Mapping[str, Any],
    earlier_id: str | None,
    mode: str,
) -> Any:
    # It warns, as of an upload that broke off, and asks nothing: it raises where there is no key.
    wandb.setup(wandb.Settings(mode=mode, show_info=False, x_service_wait=SERVICE_TIMEOUT_SECONDS))
    run = wandb.init(
        mode=mode,
        project=config.project,
        entity=config.entity,
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
    # Charts run over optimizer steps; wandb's own step counts rows, and starts anew when offline.
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step")
    return run


def _kept(run_dir: Path) -> dict[Path, tuple[str, str]]:
    """What wandb has of this run: each folder with the time and the id after which it is named."""
    folders = (run_dir / "wandb").glob("*run-*")
    matches = {folder: _RUN_FOLDER.fullmatch(folder.name) for folder in folders}
    return {folder: (match[1], match[2]) for folder, match in matches.items() if match}


def _reason(error: Exception) -> str:
    """Why wandb refused, in one line without a full stop."""
    text = explain(error)[0] if isinstance(error, ValidationError) else first_line(error)
    return text.rstrip(".")


def sync_command(run: Any) -> str:
    """What uploads a run from where a person stands."""
    return f"{_command()} sync {_folder(run)}"


def _command() -> str:
    """The client's program; where no environment is activated, the one beside this Python."""
    if shutil.which("wandb") is not None:
        return "wandb"
    return _from_here(Path(sys.executable).parent / "wandb")


def _folder(run: Any) -> str:
    return _from_here(Path(run.dir).parent)


def _from_here(path: Path) -> str:
    """The path as a person would type it into a shell."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) else path))


def _requested_mode(config: WandbConfig) -> str:
    """What the option says, or else WANDB_MODE, unset where it is empty or wandb would refuse it."""
    environment = os.environ.get("WANDB_MODE", "")
    if environment not in _MODES:
        os.environ.pop("WANDB_MODE", None)
        if environment:
            known = ", ".join(_MODES)
            print(f"wandb: WANDB_MODE '{environment}' is ignored; known: {known}", file=sys.stderr)
    return _MODES.get(environment, "auto") if config.mode == "auto" else config.mode


def _import_wandb() -> Any:
    """The wandb package; None where it is absent (a leftover `./wandb` folder is no package)."""
    # Its reports about itself are waited for at exit: 20 seconds where the server does not answer.
    os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
    # A key that was read from a file ends in a newline, which wandb refuses.
    if "WANDB_API_KEY" in os.environ:
        os.environ["WANDB_API_KEY"] = os.environ["WANDB_API_KEY"].strip()
    try:
        import wandb
    except ImportError:
        return None
    return wandb if hasattr(wandb, "init") else None


MAX_BINS = 512
"""Of one of wandb's histograms."""


def wandb_row(row: Mapping[str, Any]) -> dict[str, Any]:
    """`row` with each list of numbers as one histogram over their places, and with a picture of the load
    on the validation split.

    One key per layer instead of one per expert: a project should hold less than 10,000.
    """
    values = {
        key: _histogram(value) if isinstance(value, list) else value for key, value in row.items()
    }
    prefix, suffix = "validation/routing/", "/load"
    loads = {
        key.removeprefix(prefix).removesuffix(suffix): value
        for key, value in row.items()
        if key.startswith(prefix) and key.endswith(suffix)
    }
    if loads and importlib.util.find_spec("plotly") is not None:
        import wandb

        values[LOAD_FIGURE] = wandb.Plotly(load_heatmap(loads))
    return values


def _histogram(values: list[float]) -> Any:
    import wandb

    num_bins = min(len(values), MAX_BINS)
    places = np.arange(len(values))
    heights = np.nan_to_num(np.asarray(values, dtype=float))
    return wandb.Histogram(
        np_histogram=np.histogram(places, num_bins, (0, len(values)), weights=heights)
    )


LOAD_FIGURE = "routing/load_heatmap"
"""The key under which each validation logs it; its panel has a slider over the steps."""

FULL_COLOR = 2.0
"""Times the even share from which on a colour is the strongest: the same in every picture, so that the
pictures of a run can be compared."""

COLORS = [[0.0, "#2166ac"], [0.5, "#f7f7f7"], [1.0, "#b2182b"]]
"""Blue for experts that starve, white for the even share, red for those that are crowded."""


def load_heatmap(loads: Mapping[str, Sequence[float]]) -> Figure:
    """A heat map, a row for each layer and a column for each expert.

    The colour is the load over the even share: 1 where an expert gets what balance would give it, 0
    where it gets nothing. Layers may differ in their number of experts; a load that is not finite,
    of a layer that no token reached, is left blank.

    Args:
        loads: layer -> share of the layer's pairs that went to each expert, summing to 1.

    Raises:
        ValueError: without a layer.
    """
    from plotly.graph_objects import Figure, Heatmap

    if not loads:
        raise ValueError("a heat map of the load needs at least one layer")
    num_columns = max(len(load) for load in loads.values())
    # Plain lists: plotly packs arrays into a form that older viewers cannot read.
    ratios = [
        _padded([_over_even_share(p, load) for p in load], num_columns) for load in loads.values()
    ]
    shares = [_padded([_finite(p) for p in load], num_columns) for load in loads.values()]
    heatmap = Heatmap(
        x=list(range(num_columns)),
        y=list(loads),
        z=ratios,
        customdata=shares,
        zmin=0.0,
        zmax=FULL_COLOR,
        colorscale=COLORS,
        colorbar={
            "title": {"text": "load / even share"},
            "tickvals": [0.0, 0.5, 1.0, 1.5, FULL_COLOR],
            "ticktext": ["0, dead", "0.5", "1, even", "1.5", "2 or more"],
        },
        hoverongaps=False,
        hovertemplate=(
            "%{y}, expert %{x}<br>%{z:.2f} times the even share"
            "<br>%{customdata:.1%} of the pairs<extra></extra>"
        ),
        xgap=1,
        ygap=1,
    )
    return Figure(
        heatmap,
        layout={
            "template": {},
            "title": {"text": "Load of each expert"},
            "xaxis": {
                "title": {"text": "expert"},
                "tickformat": "d",
                "showgrid": False,
                "zeroline": False,
            },
            # The first layer on top, every one named.
            "yaxis": {
                "title": {"text": "layer", "standoff": 12},
                "type": "category",
                "autorange": "reversed",
                "automargin": True,
                "showgrid": False,
            },
        },
    )


def _over_even_share(share: float, load: Sequence[float]) -> float | None:
    value = _finite(share)
    return None if value is None else value * len(load)


def _finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def _padded(row: list[float | None], length: int) -> list[float | None]:
    return row + [None] * (length - len(row))


def alert(loggers: Iterable[Logger], title: str, text: str) -> None:
    """Tell whoever may be far away, through wandb where it is online; elsewhere nothing happens.

    Neither raises nor waits for the network.
    """
    for logger in loggers:
        if isinstance(logger, WandbRun):
            logger.alert(title, text)


def close(loggers: Iterable[Logger], status: str = "success") -> None:
    """Write out what is pending. wandb's run ends here, so that a process may hold several.

    One that fails, as on a full disk, keeps no other from ending; the first error is raised then.

    Args:
        status: how the run ended, `success` or `failed`.
    """
    errors: list[Exception] = []
    for logger in loggers:
        try:
            logger.finalize(status)
        except Exception as error:
            errors.append(error)
        if isinstance(logger, WandbRun):
            logger.finish(status)
    if errors:
        raise errors[0]
