"""Checks of all that training goes on from, beside the weights, before anything is touched.

A checksum says that a file is what was written; it does not say who wrote it, or that it was a whole state.
What belongs into a checkpoint is not listed here but taken from the run itself: its fresh model, optimizer,
schedule and loops, and the types of its callbacks' states.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from packaging.version import Version

from experiments.resuming.callback_states import require_callbacks, require_guard
from experiments.resuming.optimizer_state import SCALER, require_optimizer
from experiments.resuming.value_checks import (
    malformed,
    require_count,
    require_same_kind,
)
from moe_ffn.errors import show
from moe_ffn.training.checkpoint_file import CheckpointError
from moe_ffn.training.module import LanguageModel

_VERSION = "pytorch-lightning_version"
_OLDEST = Version("2.6")
"""Older ones are converted by Lightning when it reads them, and no run of this program is so old."""

_NEEDED = {
    "optimizer_states": list,
    "lr_schedulers": list,
    "loops": Mapping,
    "callbacks": Mapping,
    "guard": Mapping,
    "epoch": int,
    "global_step": int,
    _VERSION: str,
}
"""What is read of a checkpoint beside its weights and its identity, and as what."""


def require_training(values: Mapping[str, Any], module: LanguageModel, accumulated: int) -> None:
    """All of a checkpoint beside its weights from which training goes on.

    Args:
        accumulated: batches that make one optimizer step.

    Raises:
        CheckpointError: it is not whole, or of something else.
    """
    for name, kind in _NEEDED.items():
        if not isinstance(values.get(name), kind):
            raise CheckpointError(f"lacks '{name}', so it is no checkpoint of a run")
    _require_version(values[_VERSION])
    for name in ("global_step", "epoch"):
        require_count(values[name], name)
    step = values["global_step"]
    _require_loops(values["loops"], step, accumulated)
    taken = require_guard(values["guard"], step)
    require_optimizer(
        values, module.decoder, module.optimizer_config, module.max_steps, taken=taken
    )
    require_callbacks(values["callbacks"], step, list(module.decoder.routers()))
    for name in (SCALER, "native_amp_scaling_state"):
        if name in values:
            fresh = torch.amp.GradScaler("cpu").state_dict()
            require_same_kind(values[name], fresh, name)


def _require_version(found: str) -> None:
    try:
        version = Version(found)
    except ValueError:
        version = None
    if version is None or version < _OLDEST:
        raise malformed(_VERSION, f"must be a version from {_OLDEST} on, got {show(found)}")


def _require_loops(loops: Mapping[str, Any], step: int, accumulated: int) -> None:
    path = "loops.fit_loop"
    # Without a trainer, which a state does not depend on.
    fresh: Any = _FitLoop(None).state_dict()  # pyright: ignore[reportArgumentType]
    found = loops.get("fit_loop")
    if isinstance(found, Mapping) and found.get("state_dict") == {"combined_loader": [{}]}:
        found = {**found, "state_dict": {}}  # of loaders which have begun, and keep nothing
    require_same_kind(found, fresh, path)
    assert isinstance(found, Mapping)
    inside = "epoch_loop.automatic_optimization.optim_progress"
    of_optimizer = found[inside]["optimizer"]
    for where, progress in {
        f"{inside}.optimizer.step": of_optimizer["step"],
        f"{inside}.optimizer.zero_grad": of_optimizer["zero_grad"],
        "epoch_loop.scheduler_progress": found["epoch_loop.scheduler_progress"],
    }.items():
        _require_progress(progress, step, f"{path}.{where}")
    where = "epoch_loop.batch_progress"
    _require_progress(found[where], step * accumulated, f"{path}.{where}")
    stepped = found["epoch_loop.state_dict"]["_batches_that_stepped"]
    require_count(
        stepped, f"{path}.epoch_loop.state_dict._batches_that_stepped", max(step - 1, 0), step
    )


def _require_progress(found: Mapping[str, Any], number: int, path: str) -> None:
    """So many were made; the last one may not be counted as completed yet. An epoch has no more of them."""
    for name, count in found["total"].items():
        least = max(number - 1, 0) if name == "completed" else number
        require_count(count, f"{path}.total.{name}", least, number)
    for name, count in found["current"].items():
        require_count(count, f"{path}.current.{name}", most=found["total"][name])
