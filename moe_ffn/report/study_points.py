"""Points and lines of a study's figures, read from its results."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

from moe_ffn.config.sizes import TRAINING_FLOPS
from moe_ffn.report.arm_sizes import SizedLine
from moe_ffn.report.html import finite
from moe_ffn.studies.comparison import Arm
from moe_ffn.studies.config import StudyConfig
from moe_ffn.studies.leverage import Curve
from moe_ffn.studies.result import RunResult

AXIS_NAMES = {
    "params": "parameters",
    "active_params": "active parameters",
    "flops_per_token": "forward FLOPs per token",
    "expansion": "total over active parameters of the feed-forward blocks",
}
"""Axis that is no option of a run -> its title."""


def line_of(arm: Arm) -> str:
    """Return an arm's name up to the first comma: arms that agree in it are one line of a figure."""
    return arm.name.partition(",")[0]


def loss_of(run: RunResult) -> float:
    return run.outcome.validation_loss or math.nan


def size_of(run: RunResult, axis: str) -> float:
    """Return a run's place on an axis; NaN where it has none."""
    model, ffn = run.budget.model, run.budget.ffn
    if axis == "expansion":
        value = ffn.params / ffn.active_params if ffn.active_params else None
    elif axis in AXIS_NAMES:
        value = getattr(model, axis)
    else:
        value = run.option(axis)
    number = finite(value)
    return float(number) if number is not None and number > 0 else math.nan


def sizes_of(runs: Sequence[RunResult], axis: str) -> list[float]:
    return [size_of(run, axis) for run in runs]


def without_seeds(arms: Sequence[Arm]) -> Sequence[Arm]:
    """Return the arms with losses less the effect that their seed has on all arms alike.

    That effect moves no minimum and no slope. Arms that do not share their seeds stay as they are.
    """
    seeds = arms[0].seeds
    if len(arms) == 1 or any(arm.seeds != seeds for arm in arms):
        return arms
    means = {seed: fmean(arm.losses[seed] for arm in arms) for seed in seeds}
    whole = fmean(means.values())
    # Of A arms, the subtracted means also took 1 / A of the variance.
    scale = math.sqrt(len(arms) / (len(arms) - 1))

    def moved(run: RunResult, arm: Arm) -> RunResult:
        loss = arm.loss + (loss_of(run) - means[run.seed] + whole - arm.loss) * scale
        outcome = run.outcome.model_copy(update={"validation_loss": loss})
        return run.model_copy(update={"outcome": outcome})

    return [replace(arm, results=[moved(run, arm) for run in arm.results]) for arm in arms]


def axis_of(study: StudyConfig) -> str | None:
    """Return the axis that a study names, or the only option of its grid with several numbers."""
    numeric = [
        key
        for key, values in study.grid.items()
        if len(values) > 1 and all(isinstance(value, int | float) for value in values)
    ]
    return study.axis or (numeric[0] if len(numeric) == 1 else None)


def axis_name(axis: str) -> str:
    return AXIS_NAMES.get(axis, axis)


def lines_over(arms: Sequence[Arm], axis: str) -> list[SizedLine]:
    """Return final losses over an axis; no line where fewer than two places of it are known.

    An arm's name begins with its line; where that part moves along the axis, the rest is the line.
    """
    every = {arm.name: size_of(arm.results[0], axis) for arm in arms}
    places = {name: x for name, x in every.items() if not math.isnan(x)}
    if len(set(places.values())) < 2:
        return []

    def spread(part: int) -> float:
        groups: dict[str, list[float]] = {}
        for name, x in places.items():
            groups.setdefault(name.partition(",")[part], []).append(x)
        return max(max(found) / min(found) for found in groups.values())

    part = 0 if spread(0) >= spread(2) else 2
    found: dict[str, dict[float, list[float]]] = {}
    for arm in arms:
        if arm.name in places:
            points = found.setdefault(arm.name.partition(",")[part], {})
            points.setdefault(places[arm.name], []).extend(arm.losses.values())
    return [SizedLine(name or "all arms", points) for name, points in found.items()]


def curve_of(run: RunResult) -> Curve:
    """Return the training FLOPs and losses of a run's validations."""
    per_token = TRAINING_FLOPS * run.budget.model.flops_per_token
    pairs = [
        (float(tokens * per_token), loss)
        for tokens, loss in zip(run.validation.tokens, run.validation.losses, strict=True)
        if tokens > 0 and loss is not None
    ]
    return [x for x, _ in pairs], [loss for _, loss in pairs]
