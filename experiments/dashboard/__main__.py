"""The command: a workspace saved in wandb, or its JSON."""

from __future__ import annotations

from collections.abc import Sequence

from experiments.dashboard.options import parse_options
from experiments.exit import exit_on_bad_input
from experiments.output_file import write_output


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    # Only now: a mistake in the options should not wait for wandb.
    if options.json is not None:
        from experiments.dashboard.workspace import build_workspace, to_json

        workspace = build_workspace(options.entity, options.project, options.layers, options.name)
        if str(options.json) == "-":
            print(to_json(workspace))
        else:
            write_output("--json", options.json, to_json(workspace) + "\n")
        return 0
    from experiments.dashboard.saving import save
    from experiments.dashboard.workspace import build_workspace

    workspace = build_workspace(options.entity, options.project, options.layers, options.name)
    print(save(workspace, options.replace))
    return 0


if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
