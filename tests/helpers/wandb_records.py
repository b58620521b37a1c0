"""What wandb's own tool reads from a run's folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any


def inspect(folder: Path, environment: dict[str, str]) -> list[dict[str, Any]]:
    """Its records, in order."""
    inspected = subprocess.run(
        [sys.executable, "-m", "wandb", "leet", "inspect", "--json", str(folder)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return [json.loads(line) for line in inspected.stdout.splitlines()]


def history(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows that were logged, without wandb's own keys."""
    rows = [record["history"]["item"] for record in records if record["type"] == "history"]
    return [_nested({k: v for k, v in row.items() if not k.startswith("_")}) for row in rows]


def _nested(row: dict[str, Any]) -> dict[str, Any]:
    """`load._type` and `load.values`, as the tool prints what is no number, as one mapping `load`."""
    nested: dict[str, Any] = {}
    for key, value in row.items():
        name, _, part = key.partition(".")
        if part:
            nested.setdefault(name, {})[part] = value
        else:
            nested[name] = value
    return nested
