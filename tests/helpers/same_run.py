"""Comparison of two runs, values or folders to the bit, without durations."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from moe_ffn.runs.folder import (
    ALARMS_FILE,
    CHECKPOINTS_FOLDER,
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
)
from moe_ffn.training.monitoring.json_lines import Row, num_damaged, read_lines
from moe_ffn.training.recovery.checkpoint_file import BEST_NAME, newest_first, read_checkpoint

OF_ONE_RUN = {
    "train/tokens_per_second", "tokens_per_second", "total_seconds", "seconds", "run_id",
    "train/seconds", "train/step_seconds", "step_seconds", "train_seconds", "validation_seconds",
    "wall_seconds", "peak_memory_bytes",
}  # fmt: skip
"""Keys of what no two runs have alike."""
MISSING = object()


def differences(one: Path, other: Path) -> list[str]:
    """Differences of two run folders: metrics, alarms, samples, summary, and every state in the newest
    and the best checkpoint; empty without any.
    """
    rows, others = ([*map(dict, read_lines(run / METRICS_FILE, Row))] for run in (one, other))
    damaged = [num_damaged(run / METRICS_FILE, Row) for run in (one, other)]
    found = [
        *differing(rows, others, METRICS_FILE),
        *differing(damaged[0], damaged[1], "damaged lines"),
        *differing(_json(one / SUMMARY_FILE), _json(other / SUMMARY_FILE), SUMMARY_FILE),
    ]
    for name in (ALARMS_FILE, SAMPLES_FILE):
        found += differing(_text(one / name), _text(other / name), name)
    ours, theirs = one / CHECKPOINTS_FOLDER, other / CHECKPOINTS_FOLDER
    newest = newest_first(ours)[0].name
    found += differing(newest, newest_first(theirs)[0].name, "the newest checkpoint")
    if not found:
        for name in (newest, BEST_NAME):
            found += differing(read_checkpoint(ours / name), read_checkpoint(theirs / name), name)
    return found


def require_same(one: Path, other: Path) -> None:
    """AssertionError that names the first differences of two run folders."""
    found = differences(one, other)
    assert not found, f"{len(found)} differences: {'; '.join(found[:3])}"


def assert_same(one: Any, other: Any, where: str = "") -> None:
    """AssertionError that names the first places where two values differ, however deep."""
    found = differing(one, other, where)
    assert not found, f"{len(found)} differences: {'; '.join(found[:3])}"


def differing(one: Any, other: Any, where: str) -> list[str]:
    """The places, by their paths, in which two values are not equal to the bit; NaN equals NaN."""
    if type(one) is not type(other):
        return [f"{where}: {one!r:.40} and {other!r:.40}"]
    if isinstance(one, Mapping):
        keys = [key for key in {**one, **other} if key not in OF_ONE_RUN]
        pairs = [(key, one.get(key, MISSING), other.get(key, MISSING)) for key in keys]
    elif isinstance(one, list | tuple):
        if len(one) != len(other):
            return [f"{where}: {len(one)} and {len(other)} values"]
        pairs = zip(itertools.count(), one, other, strict=False)
    elif isinstance(one, torch.Tensor):
        return _differing_tensors(one, other, where)
    else:
        same = one == other or (one != one and other != other)
        return [] if same else [f"{where}: {one!r:.40} and {other!r:.40}"]
    return [text for name, a, b in pairs for text in differing(a, b, f"{where}/{name}")]


def _differing_tensors(one: torch.Tensor, other: torch.Tensor, where: str) -> list[str]:
    kinds = [(tuple(tensor.shape), tensor.dtype) for tensor in (one, other)]
    if kinds[0] != kinds[1]:
        return [f"{where}: {kinds[0]} and {kinds[1]}"]
    if torch.equal(one, other) or torch.allclose(one, other, rtol=0, atol=0, equal_nan=True):
        return []
    return [f"{where}: up to {float((one.double() - other.double()).abs().max()):g}"]


def _json(path: Path) -> Any:
    return json.loads(_text(path)) if path.exists() else None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.exists() else ""


def snapshot(folder: Path, *ignored: str) -> dict[str, bytes | str | None]:
    """Content of a folder by relative path: bytes of files, targets of links, None for anything else.

    Args:
        ignored: file names to leave out at any depth.
    """
    return {
        str(path.relative_to(folder)): _content(path)
        for path in sorted(folder.rglob("*"))
        if path.name not in ignored
    }


def _content(path: Path) -> bytes | str | None:
    if path.is_symlink():
        return str(path.readlink())
    return path.read_bytes() if path.is_file() else None
