"""What the runs of a study say, as points and lines of its figures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean

from moe_ffn.report.html import finite
from moe_ffn.report.study_figures import Line
from moe_ffn.studies.budget import TRAINING_FLOPS
from moe_ffn.studies.comparison import Arm
from moe_ffn.studies.config import StudyConfig
from moe_ffn.studies.leverage import Curve
from moe_ffn.studies.result import RunResult

AXIS_NAMES = {
    "params": "parameters",
    "active_params": "active parameters",
    "flops_per_token": "forward FLOPs per token",
    "expansion": "parameters of the feed-forward blocks over those that a token uses",
}
"""Axes that are no option of a run."""


def line_of(arm: Arm) -> str:
    """Its name up to the first comma: arms that agree in it are one line of a figure."""
    return arm.name.partition(",")[0]


def numbers_of(arms: Sequence[Arm]) -> dict[str, int]:
    """Line -> its number, which chooses colour and marker, the same in all figures."""
    lines = dict.fromkeys(map(line_of, arms))
    return {line: number for number, line in enumerate(lines)}


def lines_through(
    arms: Sequence[Arm], points: Mapping[str, Mapping[float, Sequence[float]]]
) -> list[Line]:
    """Arm -> its points as lines of the colour of its line, told apart by dashes."""
    numbers = numbers_of(arms)
    ends = list(dict.fromkeys(arm.name.partition(",")[2] for arm in arms))
    return [
        Line(
            arm.name,
            points[arm.name],
            numbers[line_of(arm)],
            ends.index(arm.name.partition(",")[2]),
        )
        for arm in arms
        if len(points.get(arm.name, {})) > 1
    ]


def loss_of(run: RunResult) -> float:
    return run.outcome.validation_loss or math.nan


def size_of(run: RunResult, axis: str) -> float:
    """Its place on an axis; NaN where it has none."""
    model, ffn = run.budget.model, run.budget.ffn
    if axis == "expansion":
        value = ffn.params / ffn.active_params if ffn.active_params else None
    elif axis in AXIS_NAMES:
        value = getattr(model, axis)
    else:
        value = run.option(axis)
    number = finite(value)
    return float(number) if number is not None and number > 0 else math.nan


def without_seeds(arms: Sequence[Arm]) -> Sequence[Arm]:
    """The arms with losses less what their seed does to all alike, which moves no minimum and no slope.

    `arms` itself where not all have the same seeds, or there is one.
    """
    seeds = arms[0].seeds
    if len(arms) == 1 or any(arm.seeds != seeds for arm in arms):
        return arms
    means = {seed: fmean(arm.losses[seed] for arm in arms) for seed in seeds}
    whole = fmean(means.values())
    # The means that are taken off took their share of the scatter, of A arms 1 / A of the variance.
    scale = math.sqrt(len(arms) / (len(arms) - 1))

    def moved(run: RunResult, arm: Arm) -> RunResult:
        loss = arm.loss + (loss_of(run) - means[run.seed] + whole - arm.loss) * scale
        outcome = run.outcome.model_copy(update={"validation_loss": loss})
        return run.model_copy(update={"outcome": outcome})

    return [replace(arm, results=[moved(run, arm) for run in arm.results]) for arm in arms]


def sizes_of(runs: Sequence[RunResult], axis: str) -> list[float]:
    return [size_of(run, axis) for run in runs]


def axis_of(study: StudyConfig) -> str | None:
    numeric = [
        key
        for key, values in study.grid.items()
        if len(values) > 1 and all(isinstance(value, int | float) for value in values)
    ]
    return study.axis or (numeric[0] if len(numeric) == 1 else None)


def axis_name(axis: str) -> str:
    return AXIS_NAMES.get(axis, axis)


def lines_over(arms: Sequence[Arm], axis: str) -> list[Line]:
    """Their final losses over an axis; none where all are at one place of it, or at none.

    A line is what an arm's name begins with, or, where that is what moves along the axis, what is behind its
    first comma.
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
    return [Line(name or "all arms", points, k) for k, (name, points) in enumerate(found.items())]


def curves_of(arms: Sequence[Arm], by: str) -> list[Line]:
    """Their validations over training, where all seeds have them at the same tokens."""
    found: dict[str, dict[float, list[float]]] = {}
    for arm in arms:
        points: dict[float, list[float]] = {}
        for run in arm.results:
            for x, loss in zip(*curve_of(run, by), strict=True):
                points.setdefault(x, []).append(loss)
        found[arm.name] = {x: y for x, y in points.items() if len(y) == len(arm.results)}
    return lines_through(arms, found)


def curve_of(run: RunResult, by: str = "flops") -> Curve:
    """Its validations: training FLOPs, or tokens, and losses."""
    per_token = TRAINING_FLOPS * run.budget.model.flops_per_token if by == "flops" else 1
    pairs = [
        (float(tokens * per_token), loss)
        for tokens, loss in zip(run.validation.tokens, run.validation.losses, strict=True)
        if tokens > 0 and loss is not None
    ]
    return [x for x, _ in pairs], [loss for _, loss in pairs]
