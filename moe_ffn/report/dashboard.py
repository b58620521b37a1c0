"""The wandb workspace: every panel, section by section.

A metric of sparse layers is one panel, whose regular expression matches the layers of models of any depth.
The expressions use only syntax that all dialects share.
"""

from __future__ import annotations

import math
import os
import warnings
from typing import Any

from moe_ffn.balancing.losses import BALANCING_LOSSES
from moe_ffn.config.errors import ConfigError, first_line
from moe_ffn.ffn.base import ROUTING_SUFFIX
from moe_ffn.metrics.table import RUN_METRICS, Metric, metrics_per_layer, result_columns
from moe_ffn.training.monitoring.loggers import LOAD_FIGURE, WANDB_STEP

TIMEOUT_SECONDS = 6
"""Timeout of a request to wandb's server; the library's default is 19 s, with retries."""

# wandb reads both variables at import. A workspace does not use WANDB_MODE, but an empty one is an error.
os.environ.pop("WANDB_MODE", None)
if not os.environ.get("WANDB_HTTP_TIMEOUT", "").isdecimal():
    os.environ["WANDB_HTTP_TIMEOUT"] = str(TIMEOUT_SECONDS)

# wandb-workspaces is written for an older pydantic, and users cannot fix its warnings.
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import wandb
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as ws
    from wandb_workspaces.reports.v2.interface import PanelTypes

NAME = "Feed-forward blocks"
"""Name of the saved view."""

SPEED = RUN_METRICS["tokens_per_second"]

LAYER = f"layer_[0-9]+{ROUTING_SUFFIX}"
"""Regular expression of the name of a routing: `layer_03`, `layer_03/inner`, `layer_03/round_2`."""


def training_panels() -> list[PanelTypes]:
    names = "|".join(BALANCING_LOSSES)
    return [
        *(_run_panel(metric) for metric in RUN_METRICS.values() if metric is not SPEED),
        _lines("Balancing losses", "before their weights", regex=f"^train/({names})$"),
    ]


def efficiency_panels() -> list[PanelTypes]:
    """Return panels of the speed, and of the last validation loss against the costs of a run."""
    costs = {
        "num_active_params": "active parameters",
        "num_params": "parameters in all",
        "flops_per_token": "FLOPs per token",
    }
    return [
        _run_panel(SPEED),
        reports.BarPlot(
            title=f"{SPEED.title} at the end",
            metrics=[f"train/{SPEED.key}"],
            title_x=SPEED.axis(),
            title_y="runs, by FFN type",
        ),
        *(
            # A scatter plot has no axis titles, so its title names both axes.
            reports.ScatterPlot(
                title=f"y: validation loss (nats per token), x: {title}",
                x=reports.Config(key),
                y=reports.SummaryMetric("validation/loss"),
                log_x=True,
            )
            for key, title in costs.items()
        ),
    ]


def routing_panels() -> list[PanelTypes]:
    """Return panels of the loads as heat maps, then of the metrics of each layer."""
    of_validation = [m for m in metrics_per_layer() if m.measured == "validation"]
    return [
        reports.MediaBrowser(
            title="Load over the even share: layer x expert; the slider is time",
            media_keys=[LOAD_FIGURE],
            num_columns=1,
        ),
        # wandb draws a histogram per step, with a bin per expert, as expert x step. Every model has layer 0.
        _lines("Load of layer 0", "expert", "routing/layer_00/load"),
        *(_layer_panel(m) for m in metrics_per_layer() if m not in of_validation),
        *(_layer_panel(m, "validation/") for m in [*result_columns(), *of_validation]),
    ]


def _run_panel(metric: Metric) -> reports.LinePlot:
    return _lines(metric.title, metric.axis(), *(f"{row}/{metric.key}" for row in metric.rows))


def _layer_panel(metric: Metric, prefix: str = "") -> reports.LinePlot:
    is_also_trained = bool(prefix) and metric.measured != "validation"
    title = f"{metric.title}, validation" if is_also_trained else metric.title
    return _lines(title, metric.axis(), regex=f"^{prefix}routing/{LAYER}/{metric.key}$")


def _lines(title: str, unit: str, *keys: str, regex: str | None = None) -> reports.LinePlot:
    """Return a plot over the steps of the metrics with these keys, or of all keys that `regex` matches."""
    plot = reports.LinePlot(
        title=title,
        x=WANDB_STEP,
        y=list(keys),
        title_x="optimizer step",
        title_y=unit,
        smoothing_type="none",
    )
    plot.metric_regex = regex
    return plot


COLUMNS = (
    "tags:__ALL__",
    "config:ffn_type.value",
    "config:num_params.value",
    "config:num_active_params.value",
    "config:flops_per_token.value",
    "summary:validation/loss",
    "summary:train/tokens_per_second",
)
"""Columns of the list of runs, for sorting and filtering."""

PANELS_IN_A_ROW = 3
MAX_LINES = 20
"""Maximum number of runs, or groups of runs, in a panel."""


def build_workspace(entity: str, project: str) -> ws.Workspace:
    """Return the workspace, not yet saved: training, efficiency and routing, grouped by FFN type."""
    panels = {
        "Training": training_panels(),
        "Efficiency": efficiency_panels(),
        "Routing": routing_panels(),
    }
    over_steps: dict[str, Any] = {"x_axis": WANDB_STEP, "smoothing_type": "none"}
    return ws.Workspace(
        entity=entity,
        project=project,
        name=NAME,
        sections=[
            ws.Section(
                name=title,
                panels=section,
                is_open=True,
                # Enough rows for all panels, so that there is no second page.
                layout_settings=ws.SectionLayoutSettings(
                    columns=PANELS_IN_A_ROW, rows=math.ceil(len(section) / PANELS_IN_A_ROW)
                ),
                panel_settings=ws.SectionPanelSettings(**over_steps),
            )
            for title, section in panels.items()
        ],
        settings=ws.WorkspaceSettings(max_runs=MAX_LINES, **over_steps),
        runset_settings=ws.RunsetSettings(
            groupby=[ws.Config("ffn_type")], pinned_columns=list(COLUMNS)
        ),
    )


def to_json(workspace: ws.Workspace) -> str:
    """Return the request that `save` sends: project, name and specification of the view."""
    return workspace._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=2)


def save(workspace: ws.Workspace) -> str:
    """Save the workspace as a new view; return its URL. ConfigError without a key, or if wandb rejects it."""
    try:  # this neither asks the user nor uses the network
        wandb.setup(wandb.Settings(silent=True))
        key = wandb.api.api_key
    except Exception as error:  # a malformed key
        raise ConfigError(f"wandb cannot be used: {first_line(error)}") from error
    if not key:
        raise ConfigError("no wandb key: run 'wandb login' or set WANDB_API_KEY; --json needs none")
    try:
        return workspace.save().url
    except Exception as error:  # wandb, its service and pydantic raise errors of many types
        raise ConfigError(
            f"wandb did not save the workspace: {first_line(error).rstrip('. ')}; check the network, "
            f"the key and {workspace.entity}/{workspace.project}, or use --json"
        ) from error
