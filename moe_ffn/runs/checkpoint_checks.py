"""What a run reads of a checkpoint, compared with what this run would write, before anything is touched.

A checksum says that a file is what was written; it does not say who wrote it, or that it was a whole state.
What belongs into a checkpoint is not listed here: the state of a fresh run is its template. What is wrong
is raised as a CheckpointError, `is malformed: loops.fit_loop.state_dict: must be a mapping`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any, Literal

import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.fit_loop import _FitLoop
from packaging.version import Version
from pydantic import AfterValidator, BeforeValidator, ConfigDict, Field, TypeAdapter
from torch import Tensor, nn
from torch.optim import Optimizer

from moe_ffn.config.errors import show
from moe_ffn.config.import_path import is_outside
from moe_ffn.metrics.table import Measured, Metric, compute, measured_in, statistics_of
from moe_ffn.runs.checkpoints import (
    MAX_WHOLE_NUMBER,
    malformed,
    require_count,
    require_finite,
    require_keys,
    require_ordinary,
    require_same_kind,
    require_tensor,
)
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.monitoring.alarms import ROWS_OF_MEDIAN, AlarmKind
from moe_ffn.training.optimizer import build_schedule
from moe_ffn.training.recovery.checkpoint_file import CheckpointError, SavedTensors
from moe_ffn.training.recovery.guard import STEPS_OF_MEDIAN
from moe_ffn.training.recovery.stopping import EarlyStoppingByOptions, StepTimer

_VERSION = "pytorch-lightning_version"
_MIN_VERSION = Version("2.6")
"""Lightning converts older checkpoints as it reads them; no run of this program is so old."""

SCALER = "MixedPrecision"
"""Where Lightning keeps the scale of float16's gradients."""


def _require_float(value: Any) -> Any:
    """Refuse a whole number, which Python takes for a float, in a list of measured values."""
    if type(value) is int:
        raise ValueError(f"must be a measured number, got {value:g}")
    return value


_Count = Annotated[int, Field(ge=0, le=MAX_WHOLE_NUMBER)]
_Loss = _Seconds = Annotated[float, Field(ge=0)]
_Losses = list[Annotated[float, BeforeValidator(_require_float), Field(allow_inf_nan=False)]]
_Tensors = dict[str, Annotated[Tensor, AfterValidator(require_ordinary)]]
_ListOrTuple = Field(strict=False)
_OfModel = Annotated[tuple[Literal["loss_spike", "skipped_step"], None, _Count], _ListOrTuple]
_OfLayer = Annotated[tuple[AlarmKind, str, _Count], _ListOrTuple]

_FILLED_LATER: Mapping[str, TypeAdapter[Any]] = {
    path: TypeAdapter(kind, config=ConfigDict(strict=True, arbitrary_types_allowed=True))
    for path, kind in {
        _VERSION: str,
        "loops": dict[str, Any],
        "optimizer_states": Annotated[list[dict[str, Any]], Field(min_length=1, max_length=1)],
        "optimizer_states.0.state": dict[_Count, dict[str, Any]],
        "guard.began_in": str | None,
        "guard.losses": Annotated[_Losses, Field(max_length=STEPS_OF_MEDIAN)],
        "callbacks": dict[str, Any],
        "callbacks.StepLogger.window.sums": _Tensors,
        "callbacks.StepLogger.window.step_seconds": list[_Seconds],
        "callbacks.StepLogger.routing.load": dict[str, _Tensors],
        "callbacks.StepLogger.routing.idle_steps": _Tensors,
        "callbacks.StepLogger.routing.probe": _Tensors,
        "callbacks.StepLogger.routing.last_look": int,
        "callbacks.StepLogger.rules.losses": Annotated[_Losses, Field(max_length=ROWS_OF_MEDIAN)],
        "callbacks.StepLogger.rules.lasted": list[_OfLayer],
        "callbacks.StepLogger.rules.last_seen": list[_OfModel | _OfLayer],
        "callbacks.ValidationLogger.last": dict[Literal["loss", "bits_per_byte"], float],
        "callbacks.ValidationLogger.last_step": Annotated[int, Field(ge=-1)],
        "callbacks.ValidationLogger.routing": dict[str, _Tensors],
        "callbacks.ValidationLogger.window_losses": Annotated[
            Tensor, AfterValidator(require_ordinary)
        ],
        "callbacks.CheckpointKeeper.best_loss": _Loss,
        "callbacks.CheckpointKeeper.missed_loss": _Loss,
        "callbacks.EarlyStoppingByOptions.stopping_reason": Annotated[int, Field(ge=0, le=3)],
        "callbacks.EarlyStoppingByOptions.stopping_reason_message": str | None,
        "callbacks.StepTimer.time_elapsed": dict[str, _Seconds],
    }.items()
}
"""Types of the values that are empty in a fresh state and filled while training, by their paths."""


def _template_of(fresh: Any, path: str) -> Any:
    """A fresh state as a template of a later one."""
    if isinstance(fresh, Mapping) and path not in _FILLED_LATER:
        return {key: _template_of(value, f"{path}.{key}") for key, value in fresh.items()}
    return _FILLED_LATER.get(path, fresh)


def require_training(
    values: Mapping[str, Any],
    module: LanguageModel,
    callbacks: Iterable[Callback],
    accumulated: int,
) -> None:
    """Check everything in a checkpoint that training goes on from, except the weights.

    Args:
        module: a fresh one of the run.
        callbacks: fresh ones of the run.
        accumulated: batches that make one optimizer step.

    Raises:
        CheckpointError: something is missing, malformed or of another run.
    """
    config = module.optimizer_config
    optimizer = config.build(module.decoder)
    schedule = build_schedule(optimizer, config, module.max_steps)
    scale = torch.amp.GradScaler("cpu").state_dict()
    for name, fresh in {
        _VERSION: "",
        "epoch": 0,
        "global_step": 0,
        "loops": {},
        "optimizer_states": [],
        "lr_schedulers": [schedule.state_dict()],
        "guard": module.guard.state_dict(),
        "callbacks": {},
        **{name: scale for name in (SCALER, "native_amp_scaling_state") if name in values},
    }.items():
        if name not in values:
            raise CheckpointError(f"lacks '{name}', so it is no checkpoint of a run")
        require_same_kind(values[name], _template_of(fresh, name), name)
    _require_version(values[_VERSION])
    step, num_skipped = values["global_step"], values["guard"]["num_skipped"]
    _require_loops(values["loops"].get("fit_loop"), step, accumulated)
    last = values["lr_schedulers"][0]["last_epoch"]
    require_count(last, "lr_schedulers.0.last_epoch", step, step)
    require_count(num_skipped, "guard.num_skipped", most=step)
    taken = None if SCALER in values else step - num_skipped  # it leaves steps out, uncounted
    is_own = is_outside(type(config))
    _require_optimizer(values["optimizer_states"][0], optimizer, taken, is_own=is_own)
    _require_callbacks(values["callbacks"], callbacks, step)
    _require_layers(values["callbacks"], module)


def _require_version(found: str) -> None:
    with suppress(ValueError):
        if Version(found) >= _MIN_VERSION:
            return
    raise malformed(_VERSION, f"must be a version from {_MIN_VERSION} on, got {show(found)}")


def _require_loops(found: Any, step: int, accumulated: int) -> None:
    path = "loops.fit_loop"
    if isinstance(found, Mapping) and found.get("state_dict") == {"combined_loader": [{}]}:
        found = {**found, "state_dict": {}}  # of loaders which have begun, and keep nothing
    # A state does not depend on the trainer.
    fresh: Any = _FitLoop(None).state_dict()  # pyright: ignore[reportArgumentType]
    require_same_kind(found, fresh, path)
    name = "epoch_loop.automatic_optimization.optim_progress"
    completed = found[name]["optimizer"]["step"]["total"]["completed"]
    require_count(completed, f"{path}.{name}.optimizer.step.total.completed", step, step)
    name, batches = "epoch_loop.batch_progress", step * accumulated
    require_count(found[name]["total"]["ready"], f"{path}.{name}.total.ready", batches, batches)


def _require_callbacks(found: Mapping[str, Any], callbacks: Iterable[Callback], step: int) -> None:
    for callback in callbacks:
        name, state = callback.state_key, callback.state_dict()
        if state:  # others are in no checkpoint
            path = f"callbacks.{name}"
            require_same_kind(found.get(name), _template_of(state, path), path)
    # Whether a run has these may change.
    for fresh in (EarlyStoppingByOptions("validation/loss"), StepTimer()):
        name = type(fresh).__qualname__
        expected = _template_of(fresh.state_dict(), f"callbacks.{name}")
        for key in [key for key in found if key.startswith(name)]:
            require_same_kind(found[key], expected, f"callbacks.{name}")
    steps, seen = found["StepLogger"], found["ValidationLogger"]
    require_count(steps["last_row_step"], "callbacks.StepLogger.last_row_step", most=step)
    require_count(seen["last_step"], "callbacks.ValidationLogger.last_step", -1, step)
    last_row, last_look = steps["last_row_step"], steps["routing"]["last_look"]
    if (last_look > 0) != (last_row > 0) or last_look > last_row:
        problem = f"is {last_look}, but the last row is of step {last_row}"
        raise malformed("callbacks.StepLogger.routing.last_look", problem)
    if len(seen["last"]) != (2 if seen["last_step"] >= 0 else 0):
        problem = f"has {len(seen['last'])} values at step {seen['last_step']}"
        raise malformed("callbacks.ValidationLogger.last", problem)
    keeper, loss = found["CheckpointKeeper"], seen["last"].get("loss", math.inf)
    if min(keeper["best_loss"], keeper["missed_loss"]) > loss:
        problem = f"must be at most {loss:g}, which was reached"
        raise malformed("callbacks.CheckpointKeeper.best_loss", problem)


def _require_layers(found: Mapping[str, Any], module: LanguageModel) -> None:
    """Check the names and shapes of what was measured of each sparse layer, by its number of experts."""
    path, routing = "callbacks.StepLogger", found["StepLogger"]["routing"]
    sums, validated = found["StepLogger"]["window"]["sums"], found["ValidationLogger"]["routing"]
    num_ranks = next((value.numel() for value in sums.values()), 0) or 1
    for name, value in sums.items():
        require_same_kind(value, torch.zeros(num_ranks), f"{path}.window.sums.{name}")
        require_finite(value, f"{path}.window.sums.{name}")
    known = module.decoder.config.routers()

    def num_experts(layer: str) -> int:
        if layer in known:
            return known[layer].num_experts
        pairs_E = routing["load"].get(layer, {}).get("pairs_E", torch.zeros(0))
        return routing["idle_steps"].get(layer, pairs_E).numel()  # a user's own block

    def zeros(layer: str, metrics: Iterable[Metric]) -> dict[str, Tensor]:
        return {s.name: s.zeros(num_experts(layer)) for s in statistics_of(metrics)}

    for layer, value in routing["idle_steps"].items():
        fresh = torch.zeros(num_experts(layer), dtype=torch.int64)
        require_same_kind(value, fresh, f"{path}.routing.idle_steps.{layer}")
    for layer, value in routing["probe"].items():
        shape = value.numel() // max(num_experts(layer), 1), num_experts(layer)
        fresh = torch.zeros(shape, dtype=torch.bool)
        require_same_kind(value, fresh, f"{path}.routing.probe.{layer}")

    def kinds_in(
        layer: str, values: Mapping[str, Tensor], key: str, *kinds: Measured
    ) -> list[Metric]:
        is_listed = known[layer].router.is_listed if layer in known else key in values
        return measured_in(*kinds, is_listed=is_listed)

    for layer, values in routing["load"].items():
        fresh = zeros(layer, kinds_in(layer, values, "num_pairs", "every batch"))
        require_same_kind(values, fresh, f"{path}.routing.load.{layer}")
    for layer, values in validated.items():
        kinds: tuple[Measured, ...] = ("every batch", "last step", "validation")
        metrics = kinds_in(layer, values, "experts_used", *kinds)
        fresh = compute(metrics, zeros(layer, metrics))
        require_same_kind(values, fresh, f"callbacks.ValidationLogger.routing.{layer}")


def _require_optimizer(
    found: Mapping[str, Any], fresh: Optimizer, taken: int | None, *, is_own: bool
) -> None:
    """Check a state against that of a fresh optimizer, which is used up.

    Of a user's own optimizer only two things are known: a state with the shape of its parameter keeps it, and
    everything is finite.

    Args:
        taken: how many steps moved the weights; None where that is not known.
    """
    path = "optimizer_states.0"
    require_keys(found, ("state", "param_groups"), path)
    state, groups = found["state"], found["param_groups"]
    is_in_shards = isinstance(state, SavedTensors)
    shapes_of_state = state.described if is_in_shards else state
    require_same_kind(shapes_of_state, _FILLED_LATER[f"{path}.state"], f"{path}.state")
    if not is_own:  # whose options may be of several kinds
        require_same_kind(groups, fresh.state_dict()["param_groups"], f"{path}.param_groups")
        for group, options in zip(fresh.param_groups, groups, strict=True):
            # What is kept may depend on them: a run may take up momentum on the way.
            group |= {k: v for k, v in options.items() if type(v) is type(group[k]) is float}
    shapes = [p.shape for group in fresh.param_groups for p in group["params"]]
    after_one_step, storages = _after_one_step(fresh), set[int]()
    for number, of_parameter in state.items():
        if number >= len(shapes):
            raise malformed(f"{path}.state", "is of a parameter that this run does not have")
        where, shape = f"{path}.state.{number}", shapes[number]
        kept = after_one_step.get(number, {})
        if is_own:
            kept = {n: v for n, v in kept.items() if isinstance(v, Tensor) and v.shape == shape}
        for name, template in kept.items():
            if name in of_parameter:
                require_same_kind(of_parameter[name], template, f"{where}.{name}")
            elif not is_own:
                raise malformed(where, f"lacks '{name}'")
        tensors = {n: v for n, v in of_parameter.items() if isinstance(v, Tensor)}
        for name, value in tensors.items():
            if name not in kept:  # of options that it had before, such as a momentum
                require_tensor(value, None if is_own else shape, f"{where}.{name}")
            require_finite(value, f"{where}.{name}")
            # Optimizers write in place: two tensors in one would write each other's numbers.
            storage = value.untyped_storage().data_ptr()
            if storage in storages and value.numel() and not (is_own or is_in_shards):
                raise malformed(f"{where}.{name}", "shares its place with another tensor")
            storages.add(storage)
    if is_own or taken is None:
        return
    steps = [of_parameter.get("step") for of_parameter in shapes_of_state.values()]
    counts = [step.item() for step in steps if isinstance(step, Tensor)]
    if taken and after_one_step and not state:
        raise malformed(f"{path}.state", f"is empty after {taken} steps")
    if counts and (max(counts) != taken or any(n < 0 or n % 1 for n in counts)):
        raise malformed(f"{path}.state", f"counts {max(counts):g} steps, but {taken} were taken")


def _after_one_step(optimizer: Optimizer) -> Mapping[int, Mapping[str, Any]]:
    """The optimizer's state of each parameter, by its number, after one step; uses up the optimizer.

    The step is tried on the meta device first, and then on zeros, since Adafactor looks at the size of the
    weights. Empty where a user's own optimizer fails on both.
    """
    for device in ("meta", "cpu"):
        optimizer.state.clear()
        for group in optimizer.param_groups:
            group["params"] = [
                nn.Parameter(torch.zeros_like(p, device=device)) for p in group["params"]
            ]
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        try:
            optimizer.step(lambda: 0.0)
            return optimizer.state_dict()["state"]
        except Exception:  # of any kind, since it may be a user's own
            continue
    return {}
