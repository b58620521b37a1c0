"""Fits to the runs of a study: a section of its page for each name in `fit`, with its figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from typing import Any

from moe_ffn.config.errors import ConfigError
from moe_ffn.report.arm_sizes import SizedLine, over_sizes
from moe_ffn.report.html import NONE, compact
from moe_ffn.report.markdown import markdown_table, with_interval
from moe_ffn.report.study_points import (
    AXIS_NAMES,
    axis_name,
    axis_of,
    curve_of,
    line_of,
    lines_over,
    loss_of,
    size_of,
    sizes_of,
)
from moe_ffn.studies.comparison import Arm
from moe_ffn.studies.config import StudyConfig
from moe_ffn.studies.isoflop import Parabola, fit_isoflop, fit_parabola
from moe_ffn.studies.leverage import LEVERAGE_LIMITS, leverage
from moe_ffn.studies.scaling_laws import CLARK, E_MAX, E_START, Fit, Law, fit, power_law

Image = Callable[[str, Any, str], str]
"""Name, plotly figure, alternative text -> the figure in Markdown; empty where the page does not show it."""


def _isoflop(image: Image, study: StudyConfig, arms: Sequence[Arm]) -> str:
    axis = study.axis if study.axis in AXIS_NAMES else "active_params"
    parts: list[str] = []
    rows: list[list[str]] = []
    for line in dict.fromkeys(line_of(arm) for arm in arms):
        runs = [run for arm in arms if line_of(arm) == line for run in arm.results]
        flops = [float(run.budget.training_flops) for run in runs]
        found = fit_isoflop(flops, sizes_of(runs, axis), [loss_of(run) for run in runs])
        for budget in sorted({*found.parabolas, *found.refusals}):
            parabola = found.parabolas.get(budget)
            best = with_interval(parabola.minimum if parabola else None, compact)
            rows.append([line, f"{budget:.3g}", best, found.refusals.get(budget, "")])
        drawn = [
            _line_of_fit(f"{budget:.2g} FLOPs", parabola)
            for budget, parabola in sorted(found.parabolas.items())
        ]
        if drawn:
            title = f"Final loss of {line} over {axis_name(axis)} at each budget"
            parts.append(
                image(f"isoflop-{line}", over_sizes(drawn, axis_name(axis), title=title), title)
            )
        growth = ""
        if found.exponent is not None:
            k = with_interval(found.exponent, "{:.2f}".format)
            growth = f"the best size grows as FLOPs to the power {k}. "
        parts.append(f"{line}: {growth}{found.limits}")
    head = ["line", "training FLOPs", f"best {axis_name(axis)}", "why none"]
    return "\n\n".join(filter(None, [markdown_table(head, rows), *parts]))


def _line_of_fit(name: str, found: Parabola) -> SizedLine:
    by_size: dict[float, list[float]] = {}
    for size, loss in zip(found.sizes, found.losses, strict=True):
        by_size.setdefault(size, []).append(loss)
    return SizedLine(name, by_size, found.curve, found.minimum)


def _clark(image: Image, study: StudyConfig, arms: Sequence[Arm]) -> str:
    runs = [run for arm in arms for run in arm.results]
    return _fitted(
        {"N": sizes_of(runs, "active_params"), "E": sizes_of(runs, "expansion")},
        [loss_of(run) for run in runs],
        CLARK,
        "N are the active parameters of the model; E the parameters of the feed-forward blocks over those "
        f"that a token uses. E_start ({E_START}) and E_max ({E_MAX}) are the published ones.",
    )


def _granularity(image: Image, study: StudyConfig, arms: Sequence[Arm]) -> str:
    axis = axis_of(study)
    if axis is None:
        return "No fit: the study names no `axis` that is the granularity."
    rows: list[list[str]] = []
    drawn: list[SizedLine] = []
    for line in lines_over(arms, axis):
        pairs = [(x, loss) for x, losses in line.points.items() for loss in losses]
        try:
            found = fit_parabola(*zip(*pairs, strict=True))
        except ConfigError as error:
            rows.append([line.name, NONE, f"{error}"])
            continue
        best = with_interval(found.minimum, "{:.1f}".format)
        rows.append([line.name, best, found.refusal])
        drawn.append(_line_of_fit(line.name, found))
    title = "Final loss over granularity, with parabolas"
    picture = (
        image("granularity", over_sizes(drawn, axis_name(axis), title=title), title)
        if drawn
        else ""
    )
    every = [run for arm in arms for run in arm.results]
    runs = [run for run in every if not math.isnan(size_of(run, axis))]
    law = _fitted(
        {"G": sizes_of(runs, axis)},
        [loss_of(run) for run in runs],
        power_law("G"),
        "At one size and one number of tokens Krajewski's form is this one in G alone.",
    )
    table = markdown_table(["line", "granularity with the lowest loss", "why none"], rows)
    return "\n\n".join(filter(None, [picture, table, law]))


def _leverage(image: Image, study: StudyConfig, arms: Sequence[Arm]) -> str:
    by_name = {arm.name: arm for arm in arms}
    baseline = next(arm for arm in arms if arm.base is None)
    line = line_of(baseline)
    # Final losses over all budgets of the baseline's line: of runs whose learning rate has decayed.
    sizes: dict[int, list[tuple[float, float]]] = {}
    for run in (run for arm in arms if line_of(arm) == line for run in arm.results):
        sizes.setdefault(run.seed, []).append((float(run.budget.training_flops), loss_of(run)))
    whole = {
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
        cells: list[str] = []
        for which, pair in enumerate((curves, (whole, ends)) if whole else (curves,)):
            try:
                found = leverage(*pair)
            except ConfigError as error:
                cells.append(NONE if which else str(error))
                continue
            values = list(found.by_seed.values())
            mean = fmean(values) if len(values) == 1 else None
            cells.append(with_interval(found.interval, "{:.2f}".format, mean))
            if which == 0:
                x = size_of(arm.results[0], "expansion")
                drawn.setdefault(size or "leverage", {})[x] = values
        rows.append([arm.name, dense.name, *cells])
    if not rows:
        return f"No arm beside those of {line}."
    title = "Efficiency leverage over the number of experts"
    lines = [SizedLine(name, points) for name, points in drawn.items() if len(points) > 1]
    picture = ""
    if lines:
        figure = over_sizes(lines, AXIS_NAMES["expansion"], "leverage", title)
        picture = image("leverage", figure, title)
    head = ["arm", "beside", "within the runs", *(["by final losses"] if whole else [])]
    note = (
        "C_dense / C_arm: training FLOPs that the dense model takes over those of the arm, at the same loss "
        "(Tian et al. 2025, arXiv 2507.17702); above 1 the arm saves. Within the runs: where both curves of "
        "a seed come down to the higher of their two final losses."
    )
    if whole:
        note += (
            f" By final losses: beside those of all arms of {line}, between which the FLOPs are read; a "
            "dash where the arm's loss lies beyond them."
        )
    table = markdown_table(head, rows, num_texts=2)
    return "\n\n".join(filter(None, [picture, table, note, LEVERAGE_LIMITS]))


def _fitted(
    variables: Mapping[str, Sequence[float]], losses: Sequence[float], law: Law, note: str
) -> str:
    """Return a table of the parameters of a fit, or the reason why there is none."""
    try:
        found = fit(law, variables, losses)
    except ConfigError as error:
        return f"`{law.formula}` ({law.source}): no fit; {error}."
    rows = [
        [
            name,
            with_interval(interval, "{:.3g}".format),
            *([f"{law.published[name]:g}"] if law.published else []),
        ]
        for name, interval in found.parameters.items()
    ]
    return "\n\n".join(
        [
            f"`{law.formula}` ({law.source}). {note}",
            markdown_table(
                ["parameter", "fitted", *(["published"] if law.published else [])], rows
            ),
            f"{_held_out(found)} {found.limits}",
        ]
    )


def _held_out(found: Fit) -> str:
    scatter = math.sqrt(fmean(value**2 for value in found.residuals))
    text = f"Residuals are {scatter:.2%} of the loss;"
    if found.held_out_error is None:
        return f"{text} without the {found.num_held_out} largest runs too few are left to fit."
    return (
        f"{text} fitted without the {found.num_held_out} largest runs, the form is "
        f"{found.held_out_error:.2%} off on those."
    )


FITS: Mapping[str, tuple[str, Callable[[Image, StudyConfig, Sequence[Arm]], str]]] = {
    "isoflop": ("Best size at each budget", _isoflop),
    "clark": ("Scaling with experts", _clark),
    "granularity": ("Best granularity", _granularity),
    "leverage": ("Efficiency leverage", _leverage),
}
"""Name in a study's `fit` -> title and text of its section."""
