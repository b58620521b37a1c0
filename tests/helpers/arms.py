"""Folders of finished runs of an arm, one a seed, made in milliseconds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from moe_ffn.config.yaml_files import merge
from moe_ffn.runs.config import TrainConfig
from tests.helpers.synthetic_run import write_run


def change(file: Path, **values: Any) -> None:
    """Replace values of a JSON or YAML file by their dotted keys, `_` for a dot."""
    load, dump = (
        (json.loads, json.dumps) if file.suffix == ".json" else (yaml.safe_load, yaml.safe_dump)
    )
    content = load(file.read_text())
    for key, value in values.items():
        place = content
        *parts, last = key.split("__")
        for part in parts:
            place = place[part]
        place[last] = value
    file.write_text(dump(content))


def write_arm(folder: Path, arm: str, losses: list[float], *, experts: int = 0) -> None:
    """Finished runs of an arm in a folder of runs, one a seed."""
    for seed, loss in enumerate(losses):
        run = write_run(folder / f"{arm}-seed{seed}", layers=2, experts=experts, rows=20, seed=seed)
        own = yaml.safe_load((run / "config.yaml").read_text())
        whole = merge(TrainConfig().to_dict(), own | {"seed": seed})
        (run / "config.yaml").write_text(yaml.safe_dump(whole, sort_keys=False))
        change(
            run / "facts.json",
            ffn_params=9,
            ffn_active_params=9,
            ffn_flops_per_token=9,
            tokenizer_sha256="t" * 64,
            validation_sha256="v" * 64,
        )
        change(run / "summary.json", validation_loss=loss, peak_memory_bytes=600_000_000)
