"""Checks of what the callbacks and the step guard keep in a checkpoint: its types, and what has to agree."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from torch import Tensor

from moe_ffn.errors import explain
from moe_ffn.metrics.table import compute, measured_in, statistics_of
from moe_ffn.runs.value_checks import (
    MAX_WHOLE_NUMBER,
    describe,
    malformed,
    require_count,
    require_dense,
    require_finite,
    require_keys,
    require_tensor,
)
from moe_ffn.training.monitoring.alarms import ROWS_OF_MEDIAN, AlarmKind
from moe_ffn.training.monitoring.callbacks import SampleLog, StepLogger, ValidationLogger
from moe_ffn.training.recovery.checkpoint_file import CheckpointError
from moe_ffn.training.recovery.checkpoint_keeper import CheckpointKeeper
from moe_ffn.training.recovery.guard import STEPS_OF_MEDIAN
from moe_ffn.training.recovery.stopping import EarlyStoppingByOptions

_Count = Annotated[int, Field(ge=0, le=MAX_WHOLE_NUMBER)]


def _require_measured(value: Any) -> Any:
    """A whole number is none that was measured, though Python takes it for one."""
    if type(value) is not float or not math.isfinite(value):
        raise ValueError(f"must be a finite number, got {describe(value)}")
    return value


_Measured = Annotated[float, BeforeValidator(_require_measured)]
_Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Loss = Annotated[float, Field(ge=0)]
"""Infinite where there was none yet."""


class _State(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", arbitrary_types_allowed=True)


_Found = TypeVar("_Found", bound=_State)


class _Window(_State):
    sums: dict[str, Tensor]
    num_batches: _Count
    num_skipped: _Count
    tokens: _Count
    seconds: _Seconds


class _Routing(_State):
    load: dict[str, dict[str, Tensor]]
    idle_steps: dict[str, Tensor]
    probe: dict[str, Tensor]
    last_look: Annotated[int, Field(ge=-MAX_WHOLE_NUMBER, le=MAX_WHOLE_NUMBER)]


_Key = tuple[AlarmKind, str | None, _Count]


class _Rules(_State):
    losses: Annotated[list[_Measured], Field(max_length=ROWS_OF_MEDIAN)]
    lasted: list[Annotated[_Key, Field(strict=False)]]
    last_seen: list[Annotated[_Key, Field(strict=False)]]


class _Steps(_State):
    window: _Window
    routing: _Routing
    rules: _Rules
    num_alarms: _Count
    last_row_step: _Count
    total_tokens: _Count
    total_seconds: _Seconds


class _Validation(_State):
    last: dict[Literal["loss", "bits_per_byte"], float]
    last_step: Annotated[int, Field(ge=-1, le=MAX_WHOLE_NUMBER)]
    routing: dict[str, dict[str, Tensor]]


class _Sample(_State):
    last: str


class _Keeper(_State):
    best_loss: _Loss
    missed_loss: _Loss
    should_stop: bool


class _Stopping(_State):
    wait_count: _Count
    stopped_epoch: _Count
    best_score: Tensor
    patience: _Count
    stopping_reason: Annotated[int, Field(ge=0, le=3)] = 0
    stopping_reason_message: str | None = None


class _Guard(_State):
    num_skipped: _Count
    num_in_a_row: _Count
    began_in: str | None
    losses: Annotated[list[_Measured], Field(max_length=STEPS_OF_MEDIAN)]


def require_guard(found: Any, step: int) -> int:
    """The state of a `StepGuard` after optimizer step `step`.

    Returns:
        how many of the steps were taken.

    Raises:
        CheckpointError: it is no such state.
    """
    guard = _read(_Guard, found, "guard")
    if not guard.num_in_a_row <= guard.num_skipped <= step:
        raise malformed("guard", f"has {guard.num_skipped} steps skipped of {step}")
    taken = step - guard.num_skipped
    if len(guard.losses) > taken:
        raise malformed("guard.losses", f"has {len(guard.losses)}, but {taken} steps were taken")
    return taken


def require_callbacks(found: Any, step: int, routers: Sequence[str]) -> None:
    """The states of a run's callbacks after optimizer step `step`; of others nothing is known.

    Args:
        routers: the layers that are known to route tokens.

    Raises:
        CheckpointError: one is missing, or is no such state.
    """
    if not isinstance(found, Mapping):
        raise malformed("callbacks", "must be a mapping")
    for name in found:
        if not isinstance(name, str):
            raise malformed("callbacks", "must have keys of text")
        if name.startswith(EarlyStoppingByOptions.__qualname__):
            stopping = _read(_Stopping, found[name], f"callbacks.{name}")
            require_tensor(stopping.best_score, (), f"callbacks.{name}.best_score", is_float=True)
    _of_callback(_Sample, found, SampleLog)
    steps = _of_callback(_Steps, found, StepLogger)
    validation = _of_callback(_Validation, found, ValidationLogger)
    keeper = _of_callback(_Keeper, found, CheckpointKeeper)
    _require_steps(steps, step, routers)
    _require_validation(validation, step, steps.routing.idle_steps)
    loss = validation.last.get("loss", float("inf"))
    if min(keeper.best_loss, keeper.missed_loss) > loss:
        raise malformed(
            "callbacks.CheckpointKeeper.best_loss", f"must be at most {loss:g}, which was reached"
        )


def _require_steps(steps: _Steps, step: int, routers: Sequence[str]) -> None:
    path = "callbacks.StepLogger"
    require_count(steps.last_row_step, f"{path}.last_row_step", most=step)
    has_rows = steps.last_row_step > 0
    routing, rules, window = steps.routing, steps.rules, steps.window
    if (routing.last_look > 0) != has_rows or routing.last_look > steps.last_row_step:
        raise malformed(
            f"{path}.routing.last_look",
            f"is {routing.last_look}, but the last row is of step {steps.last_row_step}",
        )
    require_count(window.num_skipped, f"{path}.window.num_skipped", most=step - steps.last_row_step)
    for name, value in window.sums.items():
        num_ranks = max(next(iter(window.sums.values())).numel(), 1)
        require_tensor(value, (num_ranks,), f"{path}.window.sums.{name}", is_float=True)
        require_finite(value, f"{path}.window.sums.{name}")
    layers = routing.idle_steps
    for layer, idle_E in layers.items():
        require_tensor(
            idle_E, (idle_E.numel(),), f"{path}.routing.idle_steps.{layer}", is_float=False
        )
    if missing := [layer for layer in routers if has_rows and layer not in layers]:
        raise malformed(f"{path}.routing.idle_steps", f"lacks '{missing[0]}'")
    for layer, sums in routing.load.items():
        where = f"{path}.routing.load.{layer}"
        _require_measures(sums, _load_sums(), "pairs_E", layers.get(layer), where)
    for layer, chosen_TE in routing.probe.items():
        where = f"{path}.routing.probe.{layer}"
        size = len(layers[layer]) if layer in layers else chosen_TE.shape[-1:].numel()
        require_tensor(chosen_TE, (chosen_TE.numel() // max(size, 1), size), where, is_float=False)
        require_dense(chosen_TE, where)
    if {layer for _, layer, _ in rules.lasted} != set(layers):
        raise malformed(f"{path}.rules.lasted", "is not about the layers that have rows")
    for kind, layer, seen in rules.last_seen:
        if (layer is None) != (kind in ("loss_spike", "skipped_step")) or seen > step:
            raise malformed(
                f"{path}.rules.last_seen", f"has {kind} of layer {layer} at step {seen}"
            )


def _require_validation(
    validation: _Validation, step: int, idle_steps: Mapping[str, Tensor]
) -> None:
    path = "callbacks.ValidationLogger"
    if validation.last_step > step:
        raise malformed(f"{path}.last_step", f"is {validation.last_step}, beyond step {step}")
    if len(validation.last) != (2 if validation.last_step >= 0 else 0):
        raise malformed(
            f"{path}.last", f"has {len(validation.last)} values at step {validation.last_step}"
        )
    for layer, values in validation.routing.items():
        where = f"{path}.routing.{layer}"
        _require_measures(values, _validation_values(), "load", idle_steps.get(layer), where)


def _require_measures(
    found: Mapping[str, Tensor],
    template: Mapping[str, tuple[int, ...]],
    of_experts: str,
    idle_E: Tensor | None,
    path: str,
) -> None:
    """What was measured of a layer: the names and shapes of `template`, where _E stands for the experts.

    Args:
        of_experts: the name of a value that there is one of for each expert.
        idle_E: another, whose length is known to be right; None where there is none yet.
    """
    require_keys(found, template, path)
    num_experts = (found[of_experts] if idle_E is None else idle_E).numel()
    for name, shape in template.items():
        expected = tuple(num_experts if size == _E else size for size in shape)
        require_tensor(found[name], expected, f"{path}.{name}")
        require_dense(found[name], f"{path}.{name}")


_E = 7
"""A number of experts by which a shape shows where it has it."""


def _load_sums() -> dict[str, tuple[int, ...]]:
    statistics = statistics_of(measured_in("every batch"))
    return {statistic.name: tuple(statistic.zeros(_E).shape) for statistic in statistics}


def _validation_values() -> dict[str, tuple[int, ...]]:
    metrics = measured_in("every batch", "last step", "validation")
    zeros = {statistic.name: statistic.zeros(_E) for statistic in statistics_of(metrics)}
    return {name: tuple(value.shape) for name, value in compute(metrics, zeros).items()}


def _of_callback(kind: type[_Found], found: Mapping[str, Any], callback: type) -> _Found:
    name = callback.__qualname__
    if name not in found:
        raise malformed("callbacks", f"lacks '{name}'")
    return _read(kind, found[name], f"callbacks.{name}")


def _read(kind: type[_Found], found: Any, path: str) -> _Found:
    try:
        return kind.model_validate(found)
    except ValidationError as error:
        line = explain(error)[0]
        raise CheckpointError(f"is malformed: {path}.{line}") from None
