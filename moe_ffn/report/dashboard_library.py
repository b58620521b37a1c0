"""wandb and wandb-workspaces, whatever the environment says, and without warnings.

wandb-workspaces is written for an older pydantic, which says so in warnings that a user can do
nothing about.
"""

from __future__ import annotations

import os
import warnings

ANSWER_SECONDS = 6
"""For each answer of wandb's server; without it the library waits for 19 s, more than once."""

# wandb reads both while it is imported. Whether runs are logged has no bearing on a workspace, and
# an empty WANDB_MODE is an error to it.
os.environ.pop("WANDB_MODE", None)
if not os.environ.get("WANDB_HTTP_TIMEOUT", "").isdecimal():
    os.environ["WANDB_HTTP_TIMEOUT"] = str(ANSWER_SECONDS)

with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    import wandb
    import wandb_workspaces.reports.v2 as reports
    import wandb_workspaces.workspaces as workspaces
    from wandb_workspaces.reports.v2.interface import PanelTypes

__all__ = ["PanelTypes", "reports", "wandb", "workspaces"]
