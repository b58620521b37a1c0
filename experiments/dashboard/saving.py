"""The workspace sent to wandb, within seconds or with one sentence about why not."""

from __future__ import annotations

from pydantic import ValidationError

from experiments.dashboard.library import wandb
from experiments.dashboard.library import workspaces as ws
from moe_ffn.errors import ConfigError, explain, first_line


def save(workspace: ws.Workspace, replace: str | None = None) -> str:
    """Save the workspace as a new view, or over the one at the URL `replace`; returns its URL.

    Raises:
        ConfigError: without a key or an answer, and where the server refuses.
    """
    if not _has_key():
        raise ConfigError(
            "no wandb key: run 'wandb login' or set WANDB_API_KEY; --json FILE needs none"
        )
    try:
        if replace is not None:
            workspace = _in_place_of(replace, workspace)
        return workspace.save().url
    except Exception as error:  # errors of every kind: wandb's own, its service's, pydantic's
        raise ConfigError(
            f"wandb did not save the workspace: {first_line(error).rstrip('. ')}; check the network, "
            f"the key and {workspace.entity}/{workspace.project}, or use --json FILE"
        ) from error


def _has_key() -> bool:
    """Whether a key is configured; asks neither for it nor the network."""
    try:
        wandb.setup(wandb.Settings(silent=True))
        return bool(wandb.api.api_key)
    except ValidationError as error:  # WANDB_SILENT=maybe
        raise ConfigError(f"wandb's settings: {'; '.join(explain(error))}") from error
    except Exception as error:  # a malformed key
        raise ConfigError(f"wandb cannot be used: {first_line(error)}") from error


def _in_place_of(url: str, workspace: ws.Workspace) -> ws.Workspace:
    """The saved view at `url` with everything in it replaced; it keeps its address."""
    saved = ws.Workspace.from_url(url)
    saved.name = workspace.name
    saved.sections = workspace.sections
    saved.settings = workspace.settings
    saved.runset_settings = workspace.runset_settings
    return saved
