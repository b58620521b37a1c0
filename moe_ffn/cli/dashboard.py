"""Make a workspace in wandb that shows the runs of a project: training, efficiency and routing, grouped by
the type of the feed-forward block.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Sequence

from moe_ffn.cli.parser import Parser
from moe_ffn.config.errors import ConfigError, command, install

_NOT_IN_NAMES = "/\\#?%:"
"""Characters that wandb rejects in names of entities and projects."""


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    # Imported here, so that a mistake in the options is reported before wandb loads.
    from moe_ffn.report.dashboard import build_workspace, save, to_json

    workspace = build_workspace(options.entity, options.project)
    print(to_json(workspace) if options.json else save(workspace))
    return 0


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Return `entity`, `project` and `json`.

    Raises:
        ConfigError: one sentence that names the option.
    """
    parser = Parser(
        prog=command("dashboard"),
        description=__doc__,
        epilog="Each call saves a new view in the project's list of saved views and prints its URL. "
        "Existing views never change.",
    )
    add = parser.add_argument
    add("--entity", required=True, metavar="E", help="the user or team that owns the project")
    add("--project", required=True, metavar="P", help="the project that the runs are in")
    add(
        "--json",
        action="store_true",
        help="print the request and send nothing; needs neither a key nor a network",
    )
    options = parser.parse_args(argv)
    for name in ("entity", "project"):
        given = getattr(options, name)
        is_name = given.isprintable() and given == given.strip() != ""
        if not is_name or set(given) & set(_NOT_IN_NAMES):
            raise ConfigError(
                f"--{name} ({given!r}) is not a name as in https://wandb.ai/ENTITY/PROJECT: a name is not "
                f"empty, has no space at its ends and none of {' '.join(_NOT_IN_NAMES)}"
            )
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ConfigError(
            f"the dashboard needs wandb-workspaces; install with: {install('dashboard')}"
        )
    return options
