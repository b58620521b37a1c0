"""Make a wandb workspace for the runs of a project: training, efficiency and routing, grouped by the type of
the feed-forward block.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence

from moe_ffn.cli.parser import Parser
from moe_ffn.config.errors import ConfigError, command

_NOT_IN_NAMES = "/\\#?%:"
"""Characters that wandb rejects in names of entities and projects."""


def main(argv: Sequence[str]) -> int:
    args = parse_options(argv)
    # Imported here, so that a mistake in the options is reported before wandb loads.
    from moe_ffn.report.dashboard import build_workspace, save, to_json

    workspace = build_workspace(args.entity, args.project)
    print(to_json(workspace) if args.json else save(workspace))
    return 0


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Return `entity`, `project` and `json`; raise ConfigError for a mistake."""
    parser = Parser(
        prog=command("dashboard"),
        description=__doc__,
        epilog="Each call saves a new view in the project and prints its URL. Existing views never change.",
    )
    parser.add("--entity E", "user or team that owns the project", required=True)
    parser.add("--project P", "project that holds the runs", required=True)
    parser.add("--json", "print the request and send nothing; needs neither a key nor a network")
    args = parser.parse_args(argv)
    for option in ("entity", "project"):
        name = getattr(args, option)
        is_valid = name.isprintable() and name == name.strip() != ""
        if not is_valid or set(name) & set(_NOT_IN_NAMES):
            raise ConfigError(
                f"--{option} ({name!r}) must be a name as in https://wandb.ai/ENTITY/PROJECT: not empty, "
                f"without spaces at its ends, and without {' '.join(_NOT_IN_NAMES)}"
            )
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ConfigError("the dashboard needs wandb-workspaces: pip install wandb-workspaces")
    return args
