"""Points and lines of the figures of a study, and the sections of its page with fits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.numbers import NONE, compact, counted, finite
from moe_ffn.config.sizes import TRAINING_FLOPS
from moe_ffn.report.studies.arm_figures import LOSS_AXIS, SizedLine, over_sizes
from moe_ffn.report.studies.markdown import markdown_table, with_interval
from moe_ffn.studies.comparison import Arm
from moe_ffn.studies.config import StudyConfig
from moe_ffn.studies.curves import (
    LEVERAGE_LIMITS,
    CurvePoints,
    Point,
    crossover,
    gaps,
    leverage,
    loss_by_flops,
)
from moe_ffn.studies.isoflop import Parabola, fit_isoflop, fit_parabola
from moe_ffn.studies.result import RunResult
from moe_ffn.studies.scaling_laws import CLARK, E_MAX, E_START, Law, fit, power_law
from moe_ffn.studies.statistics import mean_interval

# -- points and lines

AXIS_NAMES = {
    "params": "parameters",
    "active_params": "active parameters",
    "flops_per_token": "forward FLOPs per token",
    "expansion": "total over active parameters of the feed-forward blocks",
}
"""Axis that is computed from a run, not one of its options -> title."""


def line_of(arm: Arm) -> str:
    """Return the name of an arm up to the first comma; arms with the same part form one line of a figure."""
    return arm.name.partition(",")[0]


def loss_of(run: RunResult) -> float:
    return run.outcome.validation_loss or math.nan


def size_of(run: RunResult, axis: str) -> float:
    """Return the position of a run on an axis; NaN if it has none."""
    ffn = run.budget.ffn
    if axis == "expansion":
        value = ffn.params / ffn.active_params if ffn.active_params else None
    elif axis in AXIS_NAMES:
        value = getattr(run.budget.model, axis)
    else:
        value = run.option(axis)
    number = finite(value)
    return float(number) if number is not None and number > 0 else math.nan


def sizes_of(runs: Sequence[RunResult], axis: str) -> list[float]:
    return [size_of(run, axis) for run in runs]


def without_seeds(arms: Sequence[Arm]) -> Sequence[Arm]:
    """Return the arms with the common effect of each seed subtracted from their losses.

    This effect changes neither minima nor slopes. Arms without the same seeds are returned unchanged.
    """
    seeds = arms[0].seeds
    if len(arms) == 1 or any(arm.seeds != seeds for arm in arms):
        return arms
    means = {seed: fmean(arm.losses[seed] for arm in arms) for seed in seeds}
    overall_mean = fmean(means.values())
    # With A arms, subtracting the means also removes 1 / A of the variance; the scale restores it.
    scale = math.sqrt(len(arms) / (len(arms) - 1))

    def centred(run: RunResult, arm: Arm) -> RunResult:
        loss = arm.loss + (loss_of(run) - means[run.seed] + overall_mean - arm.loss) * scale
        outcome = run.outcome.model_copy(update={"validation_loss": loss})
        return run.model_copy(update={"outcome": outcome})

    return [replace(arm, results=[centred(run, arm) for run in arm.results]) for arm in arms]


def axis_of(study: StudyConfig) -> str | None:
    """Return the axis that a study names, or the only numeric option of its grid with several values."""
    numeric = [
        key
        for key, values in study.grid.items()
        if len(values) > 1 and all(finite(value) is not None for value in values)
    ]
    return study.axis or (numeric[0] if len(numeric) == 1 else None)


def axis_name(axis: str) -> str:
    return AXIS_NAMES.get(axis, axis)


def lines_over(arms: Sequence[Arm], axis: str) -> list[SizedLine]:
    """Return lines of final losses over an axis; none if fewer than two positions are known.

    The line of an arm is its name up to the first comma, or the rest if the first part varies along the axis.
    """
    sizes = {arm.name: size_of(arm.results[0], axis) for arm in arms}
    sizes = {name: size for name, size in sizes.items() if not math.isnan(size)}
    if len(set(sizes.values())) < 2:
        return []

    def largest_ratio(part: int) -> float:
        groups: dict[str, list[float]] = {}
        for name, size in sizes.items():
            groups.setdefault(name.partition(",")[part], []).append(size)
        return max(max(group) / min(group) for group in groups.values())

    part = 0 if largest_ratio(0) >= largest_ratio(2) else 2
    lines: dict[str, dict[float, list[float]]] = {}
    for arm in arms:
        if arm.name in sizes:
            points = lines.setdefault(arm.name.partition(",")[part], {})
            points.setdefault(sizes[arm.name], []).extend(arm.losses.values())
    labels = labels_of(arms) if axis == "expansion" else {}
    return [SizedLine(name or "all arms", points, labels=labels) for name, points in lines.items()]


def labels_of(arms: Sequence[Arm]) -> dict[float, str]:
    """Return the number of experts at each ratio of total to active parameters."""
    runs = [arm.results[0] for arm in arms]
    numbers = {size_of(run, "expansion"): run.option("model.ffn.num_experts") for run in runs}
    return {x: counted(n, "expert") for x, n in numbers.items() if n is not None}


def curve_of(run: RunResult) -> CurvePoints:
    """Return the training FLOPs and losses at the validations of a run."""
    per_token = TRAINING_FLOPS * run.budget.model.flops_per_token
    pairs = [
        (float(tokens * per_token), loss)
        for tokens, loss in zip(run.validation.tokens, run.validation.losses, strict=True)
        if tokens > 0 and loss is not None
    ]
    return [x for x, _ in pairs], [loss for _, loss in pairs]


# -- sections

Image = Callable[[str, Any, str], str]
"""Function (name, plotly figure, alternative text) -> Markdown; empty if the page does not show it."""

Paragraphs = Sequence[str]
"""Paragraphs of a section; empty paragraphs are left out."""


def image_over(
    image: Image,
    name: str,
    lines: Sequence[SizedLine],
    size: str,
    title: str,
    value: str = LOSS_AXIS,
) -> str:
    """Return the Markdown image of lines over a size, see `over_sizes`; empty without lines."""
    return image(name, over_sizes(lines, size, title, value), title) if lines else ""


def _isoflop(image: Image, study: StudyConfig, arms: Sequence[Arm]) -> Paragraphs:
    axis = study.axis if study.axis in AXIS_NAMES else "active_params"
    parts: list[str] = []
    rows: list[list[str]] = []
    for line in dict.fromkeys(line_of(arm) for arm in arms):
        runs = [run for arm in arms if line_of(arm) == line for run in arm.results]
        flops = [float(run.budget.training_flops) for run in runs]
        fits = fit_isoflop(flops, sizes_of(runs, axis), [loss_of(run) for run in runs])
        for budget in sorted({*fits.parabolas, *fits.problems}):
            parabola = fits.parabolas.get(budget)
            best = with_interval(parabola.minimum if parabola else None, compact)
            rows.append([line, f"{budget:.3g}", best, fits.problems.get(budget, "")])
        drawn = [
            _line_of_fit(f"{budget:.2g} FLOPs", parabola)
            for budget, parabola in sorted(fits.parabolas.items())
        ]
        title = f"Final loss of {line} over {axis_name(axis)} at each budget"
        parts.append(image_over(image, f"isoflop-{line}", drawn, axis_name(axis), title))
        growth = ""
        if fits.exponent is not None:
            k = with_interval(fits.exponent, "{:.2f}".format)
            growth = f"the best size grows as FLOPs to the power {k}. "
        parts.append(f"{line}: {growth}{fits.limits}")
    head = ["line", "training FLOPs", f"best {axis_name(axis)}", "reason if none"]
    return [markdown_table(head, rows), *parts]


def _line_of_fit(name: str, parabola: Parabola) -> SizedLine:
    by_size: dict[float, list[float]] = {}
    for size, loss in zip(parabola.sizes, parabola.losses, strict=True):
        by_size.setdefault(size, []).append(loss)
    return SizedLine(name, by_size, parabola.curve, parabola.minimum)


def _clark(image: Image, study: StudyConfig, arms: Sequence[Arm]) -> Paragraphs:
    runs = [run for arm in arms for run in arm.results]
    return _fitted(
        {"N": sizes_of(runs, "active_params"), "E": sizes_of(runs, "expansion")},
        [loss_of(run) for run in runs],
        CLARK,
        "N is the number of active parameters of the model; E is the total over the active parameters of the "
        f"feed-forward blocks. E_start ({E_START}) and E_max ({E_MAX}) are published values.",
    )


def _granularity(image: Image, study: StudyConfig, arms: Sequence[Arm]) -> Paragraphs:
    axis = axis_of(study)
    if axis is None:
        return ["No fit: set `axis` of the study to the option of the granularity."]
    rows: list[list[str]] = []
    drawn: list[SizedLine] = []
    for line in lines_over(arms, axis):
        pairs = [(x, loss) for x, losses in line.points.items() for loss in losses]
        try:
            parabola = fit_parabola(*zip(*pairs, strict=True))
        except ConfigError as error:
            rows.append([line.name, NONE, str(error)])
            continue
        best = with_interval(parabola.minimum, "{:.1f}".format)
        rows.append([line.name, best, parabola.problem])
        drawn.append(_line_of_fit(line.name, parabola))
    title = "Final loss over granularity, with parabolas"
    picture = image_over(image, "granularity", drawn, axis_name(axis), title)
    all_runs = [run for arm in arms for run in arm.results]
    runs = [run for run in all_runs if not math.isnan(size_of(run, axis))]
    law = _fitted(
        {"G": sizes_of(runs, axis)},
        [loss_of(run) for run in runs],
        power_law("G"),
        "For a fixed size and number of tokens, Krajewski's law reduces to this form in G.",
    )
    table = markdown_table(["line", "granularity with the lowest loss", "reason if none"], rows)
    return [picture, table, *law]


def _leverage_by_seed(
    dense: Mapping[int, CurvePoints], moe: Mapping[int, CurvePoints]
) -> tuple[Sequence[float], str]:
    """Return the leverage of each seed, and their mean as text; the reason as text if there is none."""
    try:
        found = leverage(dense, moe)
    except ConfigError as error:
        return [], str(error)
    values = list(found.by_seed.values())
    only_value = values[0] if len(values) == 1 else None
    return values, with_interval(found.interval, "{:.2f}".format, only_value)


def _leverage(image: Image, study: StudyConfig, arms: Sequence[Arm]) -> Paragraphs:
    by_name = {arm.name: arm for arm in arms}
    baseline = next(arm for arm in arms if arm.base is None)
    line = line_of(baseline)
    # Final losses of the baseline's line at all budgets, from runs whose learning rate has decayed.
    sizes: dict[int, list[tuple[float, float]]] = {}
    for run in (run for arm in arms if line_of(arm) == line for run in arm.results):
        sizes.setdefault(run.seed, []).append((float(run.budget.training_flops), loss_of(run)))
    final_curves = {
        seed: ([flops for flops, _ in sorted(points)], [loss for _, loss in sorted(points)])
        for seed, points in sizes.items()
        if len({flops for flops, _ in points}) == len(points) > 1
    }
    rows: list[list[str]] = []
    drawn: dict[str, dict[float, Sequence[float]]] = {}
    for arm in arms:
        if line_of(arm) == line:
            continue
        size = arm.name.partition(",")[2]
        dense = by_name.get(f"{line},{size}", baseline) if size else baseline
        curves = [{run.seed: curve_of(run) for run in side.results} for side in (dense, arm)]
        ends = {r.seed: ([float(r.budget.training_flops)], [loss_of(r)]) for r in arm.results}
        values, cell = _leverage_by_seed(*curves)
        rows.append([arm.name, dense.name, cell])
        if values:
            x = size_of(arm.results[0], "expansion")
            drawn.setdefault(size or "leverage", {})[x] = values
        if final_curves:
            values, cell = _leverage_by_seed(final_curves, ends)
            rows[-1].append(cell if values else NONE)
    if not rows:
        return [f"No arm except those of {line}."]
    title = "Efficiency leverage over the number of experts"
    lines = [
        SizedLine(name, points, labels=labels_of(arms))
        for name, points in drawn.items()
        if len(points) > 1
    ]
    picture = image_over(image, "leverage", lines, AXIS_NAMES["expansion"], title, "leverage")
    head = ["arm", "compared with", "within the runs"]
    note = (
        "C_dense / C_arm: training FLOPs of the dense model over those of the arm at the same loss "
        "(Tian et al. 2025, arXiv 2507.17702); above 1, the arm saves FLOPs. Within the runs: both curves of "
        "a seed are read where they reach the higher of their two final losses."
    )
    if final_curves:
        head.append("by final losses")
        note += (
            f" By final losses: the FLOPs are interpolated between the final losses of all arms of {line}; a "
            "dash if the arm's loss lies outside their range."
        )
    return [picture, markdown_table(head, rows, num_texts=2), note, LEVERAGE_LIMITS]


def _fitted(
    variables: Mapping[str, Sequence[float]], losses: Sequence[float], law: Law, note: str
) -> Paragraphs:
    """Return the parameters of a fit and its errors, or the reason why there is no fit."""
    try:
        fitted = fit(law, variables, losses)
    except ConfigError as error:
        return [f"`{law.formula}` ({law.source}): no fit; {error}."]
    rows = [
        [
            name,
            with_interval(interval, "{:.3g}".format),
            *([f"{law.published[name]:g}"] if law.published else []),
        ]
        for name, interval in fitted.parameters.items()
    ]
    scatter = math.sqrt(fmean(value**2 for value in fitted.residuals))
    without = f"without the {fitted.num_held_out} largest runs"
    held_out = (
        f"{without}, too few are left to fit"
        if fitted.held_out_error is None
        else f"fitted {without}, the form misses them by {fitted.held_out_error:.2%}"
    )
    return [
        f"`{law.formula}` ({law.source}). {note}",
        markdown_table(["parameter", "fitted", *(["published"] if law.published else [])], rows),
        f"Residuals are {scatter:.2%} of the loss; {held_out}. {fitted.limits}",
    ]


FITS: Mapping[str, tuple[str, Callable[[Image, StudyConfig, Sequence[Arm]], Paragraphs]]] = {
    "isoflop": ("Best size at each budget", _isoflop),
    "clark": ("Scaling with experts", _clark),
    "granularity": ("Best granularity", _granularity),
    "leverage": ("Efficiency leverage", _leverage),
}
"""Name in the `fit` of a study -> title and function of its section."""

# -- losses by the FLOPs of all training

Lines = Mapping[str, Sequence[Point]]
"""Name of an arm up to the first comma -> its points."""


def loss_by_all_flops(image: Image, study: StudyConfig, arms: Sequence[Arm]) -> Paragraphs:
    """Return the section; empty if the study does not set `initial_flops`."""
    if study.initial_flops is None:
        return []
    runs = [run for arm in arms for run in arm.results]
    lines = loss_by_flops(runs, study.initial_flops)
    seeds = [
        loss_by_flops([run for run in runs if run.seed == seed], study.initial_flops)
        for seed in dict.fromkeys(run.seed for run in runs)
    ]
    drawn = [
        SizedLine(name, {point.flops: point.losses for point in points})
        for name, points in lines.items()
    ]
    axis, title = "FLOPs of all training", "Final loss over the FLOPs of all training"
    losses = [
        [name, compact(point.flops), f"{point.loss:.4f}"]
        for name, points in lines.items()
        for point in points
    ]
    crossings = [
        _crossing(lines, seeds, one, other)
        for one, other in itertools.combinations(lines, 2)
        if gaps(lines[one], lines[other])
    ]
    head = (
        "arm|compared with|crossover FLOPs|crossover of single seeds|difference at the fewest FLOPs|"
        "difference at the most FLOPs"
    )
    return [
        f"The model from which runs started (`init_from`) took {compact(study.initial_flops)} FLOPs. "
        "This section counts them; the sections above count only the training of each run.",
        image_over(image, "all-flops", drawn, axis, title),
        markdown_table(["arm", axis, "loss"], losses),
        markdown_table(head.split("|"), crossings, num_texts=2),
        "Crossover: from these FLOPs on, the loss of the first arm is the same or lower. Between points, the "
        "loss is interpolated linearly in log FLOPs. Differences are paired by seed, at the fewest and at "
        "the most FLOPs of both arms, with the 95 % interval (Student's t). Nothing was measured outside "
        "this range. All seeds started from one model, so the scatter comes only from the second training.",
    ]


def _crossing(lines: Lines, seeds: Sequence[Lines], one: str, other: str) -> list[str]:
    """Return the table row of two arms; the first arm has the lower loss at the most FLOPs of both."""
    if gaps(lines[one], lines[other])[-1][1] > 0:
        one, other = other, one
    flops = crossover(lines[one], lines[other])
    pairs = [
        (seed[one], seed[other])
        for seed in seeds
        if all(_flops(seed.get(arm, ())) == _flops(lines[arm]) for arm in (one, other))
    ]
    by_seed = sorted(x for pair in pairs if (x := crossover(*pair)) is not None)
    ends = " to ".join(dict.fromkeys(map(compact, (by_seed[0], by_seed[-1])))) if by_seed else NONE
    return [
        other,
        one,
        NONE if flops is None else compact(flops),
        f"{ends} ({len(by_seed)} of {len(pairs)} seeds)",
        *(_difference(pairs, end) for end in (0, -1)),
    ]


def _flops(points: Sequence[Point]) -> list[float]:
    return [point.flops for point in points]


def _difference(pairs: Sequence[tuple[Sequence[Point], Sequence[Point]]], end: int) -> str:
    if not pairs:
        return NONE
    ends = [gaps(*pair)[end] for pair in pairs]
    values = [gap for _, gap in ends]
    cell = with_interval(mean_interval(values), "{:+.4f}".format, fmean(values))
    return f"{cell} at {compact(ends[0][0])}"
