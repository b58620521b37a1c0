"""The command: a workspace saved in wandb, or its JSON."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from experiments.dashboard.options import parse_options
from experiments.exit import exit_on_bad_input
from moe_ffn.errors import ConfigError, reason


def main(argv: Sequence[str]) -> int:
    options = parse_options(argv)
    # Only now: a mistake in the options should not wait for wandb.
    if options.json is not None:
        from experiments.dashboard.workspace import build_workspace, to_json

        workspace = build_workspace(options.entity, options.project, options.layers, options.name)
        _write(options.json, to_json(workspace))
        return 0
    from experiments.dashboard.saving import save
    from experiments.dashboard.workspace import build_workspace

    workspace = build_workspace(options.entity, options.project, options.layers, options.name)
    print(save(workspace, options.replace))
    return 0


def _write(path: Path, text: str) -> None:
    if str(path) == "-":
        print(text)
        return
    try:
        path.write_text(text + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--json {path}: {reason(error)}") from error


if __name__ == "__main__":
    raise SystemExit(exit_on_bad_input(main))
