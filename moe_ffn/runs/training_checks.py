"""Checks of all that training goes on from, beside the weights, before anything is touched.

A checksum says that a file is what was written; it does not say who wrote it, or that it was a whole state.
What belongs into a checkpoint is not listed here but taken from the run itself: its fresh model, optimizer,
schedule and loops, and the types of its callbacks' states.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from lightning.pytorch.loops.fit_loop import _FitLoop
from packaging.version import Version
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_ffn.errors import show
from moe_ffn.import_path import is_outside
from moe_ffn.runs.callback_checks import require_callbacks, require_guard
from moe_ffn.runs.value_checks import (
    describe,
    malformed,
    require_count,
    require_dense,
    require_finite,
    require_keys,
    require_same_kind,
    require_tensor,
)
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.optimizer import OptimizerConfig, build_schedule
from moe_ffn.training.recovery.checkpoint_file import CheckpointError

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


SCALER = "MixedPrecision"
"""Where Lightning keeps the scale of float16's gradients."""


@dataclass(frozen=True)
class _OfParameter:
    """What belongs into the state of a parameter."""

    shape: torch.Size
    kept: Mapping[str, Any]
    """By its names, values of the kinds that one step makes."""


def require_optimizer(
    values: Mapping[str, Any],
    model: nn.Module,
    config: OptimizerConfig,
    max_steps: int,
    taken: int,
) -> None:
    """The states of the one optimizer and the one schedule of a run.

    Of an optimizer of somebody's own it is not known how its state goes on after the first step: what has
    the shape of a parameter then has it later too, and everything is finite.

    Args:
        values: a whole checkpoint.
        taken: how many optimizer steps moved the weights.

    Raises:
        CheckpointError: they are of something else, or broken.
    """
    fresh = config.build(model)
    schedule = build_schedule(fresh, config, max_steps)
    require_same_kind(values["lr_schedulers"], [schedule.state_dict()], "lr_schedulers")
    step, last = values["global_step"], values["lr_schedulers"][0]["last_epoch"]
    require_count(last, "lr_schedulers.0.last_epoch", step, step)
    if not isinstance(values["optimizer_states"], list) or len(values["optimizer_states"]) != 1:
        raise malformed("optimizer_states", "must be a list of 1")
    found, path = values["optimizer_states"][0], "optimizer_states.0"
    require_keys(found, ("state", "param_groups"), path)
    is_own = is_outside(type(config))
    groups = _require_groups(found["param_groups"], fresh, f"{path}.param_groups", is_own=is_own)
    if not isinstance(found["state"], Mapping):
        raise malformed(f"{path}.state", "must be a mapping")
    expected = _expected(fresh, groups)
    counts = _require_state(found["state"], expected, f"{path}.state", is_own=is_own)
    if is_own:
        return
    if taken and not found["state"] and any(parameter.kept for parameter in expected):
        raise malformed(f"{path}.state", f"is empty after {taken} steps")
    # A step that float16's scaler left out is one that nobody counted.
    if counts and SCALER not in values:
        most = max(count.item() for count in counts)
        if most != taken or not all(count == count.round() and count >= 1 for count in counts):
            raise malformed(f"{path}.state", f"counts {most:g} steps, but {taken} were taken")


def _require_groups(
    found: Any, fresh: Optimizer, path: str, *, is_own: bool
) -> list[Mapping[str, Any]]:
    expected = fresh.state_dict()["param_groups"]
    if not isinstance(found, list) or len(found) != len(expected):
        raise malformed(path, f"must be a list of {len(expected)}")
    for place, (mine, its) in enumerate(zip(found, expected, strict=True)):
        where = f"{path}.{place}"
        if is_own:  # whose options may be of several kinds
            mine_params = mine.get("params") if isinstance(mine, Mapping) else None
            require_same_kind(mine_params, its["params"], f"{where}.params")
        else:
            require_same_kind(mine, its, where)
        if mine["params"] != its["params"]:
            raise malformed(f"{where}.params", "names other parameters")
    return found


def _require_state(
    found: Mapping[Any, Any], expected: Sequence[_OfParameter], path: str, *, is_own: bool
) -> list[Tensor]:
    """Raise unless it is a state; returns the step counts in it."""
    storages: set[int] = set()
    counts: list[Tensor] = []
    for number, state in found.items():
        if type(number) is not int or not 0 <= number < len(expected):
            raise malformed(path, "is of a parameter that this run does not have")
        where, of_parameter = f"{path}.{number}", expected[number]
        if not isinstance(state, Mapping):
            raise malformed(where, f"must be a mapping, got {describe(state)}")
        if missing := [] if is_own else [name for name in of_parameter.kept if name not in state]:
            raise malformed(where, f"lacks '{missing[0]}'")
        for name, value in state.items():
            place = f"{where}.{name}"
            template = of_parameter.kept.get(name)
            is_moment = isinstance(template, Tensor) and template.shape == of_parameter.shape
            if is_moment or (name in of_parameter.kept and not is_own):
                require_same_kind(value, template, place)
            elif isinstance(value, Tensor):
                require_tensor(value, value.shape if is_own else of_parameter.shape, place)
            if not isinstance(value, Tensor):
                continue
            require_dense(value, place)
            require_finite(value, place)
            if not is_own:
                _require_own_storage(value, storages, place)
                counts += [value] if name == "step" and name in of_parameter.kept else []
    return counts


def _require_own_storage(value: Tensor, storages: set[int], path: str) -> None:
    """Optimizers write in place: two tensors in one place would write each other's numbers."""
    place = value.untyped_storage().data_ptr()
    if place in storages and value.numel():
        raise malformed(path, "shares its place with another tensor")
    storages.add(place)


def _expected(fresh: Optimizer, groups: Sequence[Mapping[str, Any]]) -> list[_OfParameter]:
    """What is kept of each parameter.

    With the numbers among the options that the checkpoint was made with, on which it may depend what is
    kept: a run may take up momentum on the way.
    """
    known: dict[tuple[int, torch.Size, torch.dtype], _OfParameter] = {}
    found: list[_OfParameter] = []
    for place, (group, options) in enumerate(zip(list(fresh.param_groups), groups, strict=True)):
        numbers = {
            name: options[name]
            for name, value in group.items()
            if type(value) is float and type(options.get(name)) is float
        }
        for parameter in group["params"]:
            key = place, parameter.shape, parameter.dtype
            if key not in known:
                kept = _kept_by_one_step(fresh, {**group, **numbers}, parameter)
                known[key] = _OfParameter(parameter.shape, kept)
            found.append(known[key])
    return found


def _kept_by_one_step(
    optimizer: Optimizer, group: dict[str, Any], parameter: nn.Parameter
) -> dict[str, Any]:
    """Tried without memory first, and then on zeros, since Adafactor looks at the size of the weights.

    Nothing where neither can be tried, of an optimizer of somebody's own.
    """
    for device in ("meta", "cpu"):
        blank = nn.Parameter(torch.zeros_like(parameter, device=device))
        blank.grad = torch.zeros_like(blank)
        optimizer.state.clear()
        optimizer.param_groups[:] = [{**group, "params": [blank]}]
        try:
            optimizer.step(lambda: 0.0)
        except Exception:  # of any kind, since it may be anybody's
            continue
        state = dict(optimizer.state[blank])
        optimizer.state.clear()
        return {
            name: value.to("meta") if isinstance(value, Tensor) else value
            for name, value in state.items()
        }
    return {}
