"""Sections and runs put together: a pure function of whose project it is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from experiments.dashboard.library import PanelTypes
from experiments.dashboard.library import workspaces as ws
from experiments.dashboard.options import DEFAULT_LAYERS, DEFAULT_NAME
from experiments.dashboard.panels import (
    STEP,
    efficiency_panels,
    routing_panels,
    training_panels,
)

COLUMNS = (
    "tags:__ALL__",
    "config:ffn_type.value",
    "config:num_params.value",
    "config:num_active_params.value",
    "config:flops_per_token.value",
    "summary:validation/loss",
    "summary:train/tokens_per_second",
)
"""Of the list of runs, beside their names; each can be sorted and filtered by."""

GROUP_COLORS = {
    "identity": "#7f7f7f",
    "dense": "#1f77b4",
    "swiglu": "#ff7f0e",
    "geglu": "#bcbd22",
    "reglu": "#8c564b",
    "glu": "#c7a76c",
    "bilinear": "#e377c2",
    "conv": "#17becf",
    "moe": "#2ca02c",
    "mixture_of_depths": "#9467bd",
    "soft_moe": "#d62728",
}
"""FFN type -> its colour in every panel; of other types wandb chooses one."""

PANELS_IN_A_ROW = 3
MAX_LINES = 20
"""Runs, or groups of them, that a panel draws."""


def build_workspace(
    entity: str,
    project: str,
    layers: Sequence[int] = DEFAULT_LAYERS,
    name: str = DEFAULT_NAME,
) -> ws.Workspace:
    """The workspace, not yet saved: training, efficiency and routing, grouped by FFN type.

    Nothing is filtered out: the columns are what to filter by.

    Args:
        layers: layers whose load has a heat map of its own, expert x step.
        name: of the saved view.
    """
    return ws.Workspace(
        entity=entity,
        project=project,
        name=name,
        sections=[
            _section("Training", training_panels()),
            _section("Efficiency", efficiency_panels()),
            _section("Routing", routing_panels(layers)),
        ],
        settings=ws.WorkspaceSettings(x_axis=STEP, smoothing_type="none", max_runs=MAX_LINES),
        runset_settings=ws.RunsetSettings(
            groupby=[ws.Config("ffn_type")],
            group_colors={**GROUP_COLORS},
            pinned_columns=list(COLUMNS),
        ),
    )


def to_json(workspace: ws.Workspace) -> str:
    """What saving would send: whose project, the view's name, and its specification."""
    return workspace._to_model().model_dump_json(by_alias=True, exclude_none=True, indent=2)


def _section(name: str, panels: list[PanelTypes]) -> ws.Section:
    rows = math.ceil(len(panels) / PANELS_IN_A_ROW)  # nothing stands on a second page
    return ws.Section(
        name=name,
        panels=panels,
        is_open=True,
        layout_settings=ws.SectionLayoutSettings(columns=PANELS_IN_A_ROW, rows=rows),
        panel_settings=ws.SectionPanelSettings(x_axis=STEP, smoothing_type="none"),
    )
