"""Make a workspace in wandb that shows the runs of this project: training, efficiency and routing, grouped by
the type of the feed-forward block.
"""

from __future__ import annotations

import argparse
import importlib.util
import unicodedata
from collections.abc import Sequence
from urllib.parse import parse_qs, urlsplit

from moe_ffn.cli.parser import Parser, check_output, whole_number, write_output
from moe_ffn.config.errors import ConfigError, command, expand_path, install

_OPENING = '{\n  "entity": '
"""Beginning of the JSON of a workspace."""

_NOT_IN_NAMES = "/\\#?%:"
"""Characters that wandb rejects in names of entities and projects."""


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    # Only now: a mistake in the options should not wait for wandb.
    from moe_ffn.report.dashboard import build_workspace, save, to_json

    given = {key: getattr(options, key) for key in ("layers", "name") if hasattr(options, key)}
    workspace = build_workspace(options.entity, options.project, **given)
    if options.json is None:
        print(save(workspace, options.replace))
    elif str(options.json) == "-":
        print(to_json(workspace))
    else:
        write_output("--json", options.json, to_json(workspace) + "\n")
    return 0


def parse_options(argv: Sequence[str]) -> argparse.Namespace:
    """Parse a command line; `--help` prints and exits.

    Returns:
        `entity` and `project`; `name` and `layers`, where they are given; `replace`, the URL of the saved
        view to write over, or None; `json`, the path of the file to write, or None.

    Raises:
        ConfigError: one sentence that names the option.
    """
    options = _parser().parse_args(argv)
    for name in ("entity", "project"):
        given = getattr(options, name)
        is_name = given.isprintable() and given == given.strip() != ""
        if not is_name or set(given) & set(_NOT_IN_NAMES):
            raise ConfigError(
                f"--{name} ({given!r}) is no name as in https://wandb.ai/ENTITY/PROJECT, which is not empty "
                f"and has no space at its ends and none of {' '.join(_NOT_IN_NAMES)}"
            )
    if hasattr(options, "name"):
        # Otherwise it is pydantic that refuses symbols, with a traceback.
        symbols = [c for c in options.name if unicodedata.category(c)[0] in "SC"]
        if symbols or not options.name.strip():
            raise ConfigError(
                f"--name ({options.name!r}) "
                + (
                    f"must not hold {symbols[0]!r}: wandb takes no symbols"
                    if symbols
                    else "is empty"
                )
            )
    if hasattr(options, "layers"):
        layers = {text: whole_number(text) for text in options.layers}
        for text, number in layers.items():
            if number is None:
                raise ConfigError(f"--layers '{text}' is not the number of a layer, such as 0")
        options.layers = tuple(dict.fromkeys(layers.values()))
    options.replace = _saved_view(options)
    if options.json is not None:
        options.json = expand_path(options.json, "--json")
        if str(options.json) != "-":
            check_output("--json", options.json, _OPENING)
    if importlib.util.find_spec("wandb_workspaces") is None:
        raise ConfigError(
            f"the dashboard needs wandb-workspaces; install with: {install('dashboard')}"
        )
    return options


def _parser() -> Parser:
    parser = Parser(
        prog=command("dashboard"),
        description=__doc__,
        epilog="Each call saves a new view in the project's list of saved views and prints its URL. "
        "What is there is never changed, a view of the same name neither, unless --replace names it.",
    )
    add = parser.add_argument
    add("--entity", required=True, metavar="E", help="the user or team that owns the project")
    add("--project", required=True, metavar="P", help="the project that the runs are in")
    add(
        "--name",
        default=argparse.SUPPRESS,
        help="name of the saved view; default: Feed-forward blocks",
    )
    add(
        "--layers",
        nargs="*",
        default=argparse.SUPPRESS,
        metavar="N",
        help="layers whose load has a heat map of its own, expert x step, beside the one of all "
        "layers; none where nothing follows; default: 0. Every other panel shows all layers",
    )
    add(
        "--replace",
        metavar="URL",
        help="the URL that an earlier call printed: write over that saved view, and over what was "
        "changed in it by hand, instead of adding one",
    )
    add(
        "--json",
        metavar="FILE",
        help="write what would be sent there, or to standard output for -, and send nothing; "
        "needs neither a key nor a network",
    )
    return parser


def _saved_view(given: argparse.Namespace) -> str | None:
    """Return the URL of `--replace`, which must be a saved view of this project."""
    url: str | None = given.replace
    if url is None:
        return None
    if given.json is not None:
        raise ConfigError("--replace and --json exclude each other: --json sends nothing")
    try:
        address = urlsplit(url)
    except ValueError:  # brackets that hold no address
        address = urlsplit("")
    view = next(iter(parse_qs(address.query).get("nw", [])), "")
    if address.scheme not in ("http", "https") or not view:
        raise ConfigError(
            f"--replace '{url}' is not the URL of a saved view, "
            "such as https://wandb.ai/ENTITY/PROJECT?nw=a0b1c2d3"
        )
    # A browser may show it with `/workspace`, which the library does not understand.
    path = address.path.removesuffix("/workspace")
    if path != f"/{given.entity}/{given.project}":
        raise ConfigError(f"--replace '{url}' is not a view of {given.entity}/{given.project}")
    if view.startswith("nwuser"):
        raise ConfigError(
            f"--replace '{url}' is somebody's personal workspace; only saved views can be replaced"
        )
    return f"{address.scheme}://{address.netloc}{path}?nw={view}"
