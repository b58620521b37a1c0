"""When two runs came to the same: to the bit, in everything but the time they took."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_ffn.runs.folder import (
    ALARMS_FILE,
    CHECKPOINTS_FOLDER,
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
)

OF_ONE_RUN = {
    "train/tokens_per_second", "tokens_per_second", "total_seconds", "seconds", "run_id"
}  # fmt: skip
"""Keys of what no two runs have alike."""


def differences(one: Path, other: Path) -> list[str]:
    """Where two run folders differ: metrics, alarms, samples, summary, the newest checkpoint and the best,
    with weights, optimizer, router biases and every other state; empty where nowhere.
    """
    from moe_ffn.training.monitoring.json_lines import Row, num_damaged, read_lines
    from moe_ffn.training.recovery.checkpoint_file import (
        BEST_NAME,
        read_checkpoint,
        step_checkpoints,
    )

    logs = one / METRICS_FILE, other / METRICS_FILE
    rows = [[dict(row) for row in read_lines(log, Row)] for log in logs]
    damaged = [num_damaged(log, Row) for log in logs]
    found = [
        *_differ(rows[0], rows[1], METRICS_FILE),
        *_differ(damaged[0], damaged[1], "damaged lines"),
        *_differ(_json(one / SUMMARY_FILE), _json(other / SUMMARY_FILE), SUMMARY_FILE),
    ]
    for name in (ALARMS_FILE, SAMPLES_FILE):
        found += _differ(_text(one / name), _text(other / name), name)
    ours, theirs = one / CHECKPOINTS_FOLDER, other / CHECKPOINTS_FOLDER
    newest = step_checkpoints(ours)[0].name
    found += _differ(newest, step_checkpoints(theirs)[0].name, "the newest checkpoint")
    if not found:
        for name in (newest, BEST_NAME):
            found += _differ(read_checkpoint(ours / name), read_checkpoint(theirs / name), name)
    return found


def require_same(one: Path, other: Path) -> None:
    """AssertionError that names the first differences."""
    found = differences(one, other)
    assert not found, f"{len(found)} differences: {'; '.join(found[:3])}"


def _differ(one: Any, other: Any, where: str) -> list[str]:
    import torch

    if isinstance(one, Mapping) and isinstance(other, Mapping):
        keys = [key for key in [*one, *(k for k in other if k not in one)] if key not in OF_ONE_RUN]
        return [
            text for key in keys for text in _differ(one.get(key), other.get(key), f"{where}/{key}")
        ]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple) and len(one) == len(other):
        pairs = enumerate(zip(one, other, strict=True))
        return [text for place, pair in pairs for text in _differ(*pair, f"{where}/{place}")]
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        if one.shape == other.shape and torch.equal(one.nan_to_num(0.5), other.nan_to_num(0.5)):
            return []
        if one.shape != other.shape:
            return [f"{where}: shapes {tuple(one.shape)} and {tuple(other.shape)}"]
        return [f"{where}: up to {float((one.double() - other.double()).abs().max()):g}"]
    same = one == other or (one != one and other != other)
    return [] if same else [f"{where}: {one!r:.40} and {other!r:.40}"]


def _json(path: Path) -> Any:
    return json.loads(_text(path)) if path.exists() else None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""
