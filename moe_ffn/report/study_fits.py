"""What a study fits to its runs: a section of its page for each of `fit`, with its figure."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from statistics import fmean

from moe_ffn.config.errors import ConfigError
from moe_ffn.report import study_figures as figures
from moe_ffn.report.html import NONE, compact
from moe_ffn.report.markdown import markdown_table, with_interval
from moe_ffn.report.study_figures import Line
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
from moe_ffn.studies.isoflop import fit_isoflop, fit_parabola
from moe_ffn.studies.leverage import LEVERAGE_LIMITS, leverage
from moe_ffn.studies.scaling_laws import CLARK, Fit, Law, fit, power_law

Image = Callable[[str, str, str], str]
"""Name, SVG and alternative text of a figure -> the figure in Markdown; empty where it is not shown."""


def _isoflop(image: Image, study: StudyConfig, arms: Sequence[Arm]) -> str:
    axis = study.axis if study.axis in AXIS_NAMES else "active_params"
    groups: dict[str, list[Line]] = {}
    rows: list[list[str]] = []
    notes: list[str] = []
    for line in dict.fromkeys(line_of(arm) for arm in arms):
        runs = [run for arm in arms if line_of(arm) == line for run in arm.results]
        flops = [float(run.budget.training_flops) for run in runs]
        found = fit_isoflop(flops, sizes_of(runs, axis), [loss_of(run) for run in runs])
        for number, budget in enumerate(sorted({*found.parabolas, *found.refusals})):
            parabola = found.parabolas.get(budget)
            minimum = parabola.minimum if parabola else None
            best = with_interval(minimum, compact)
            rows.append([line, f"{budget:.3g}", best, found.refusals.get(budget, "")])
            if parabola is not None:
                by_size: dict[float, list[float]] = {}
                for size, loss in zip(parabola.sizes, parabola.losses, strict=True):
                    by_size.setdefault(size, []).append(loss)
                groups.setdefault(line, []).append(
                    Line(
                        f"{budget:.2g} FLOPs",
                        by_size,
                        number,
                        curve=parabola.curve,
                        minimum=minimum,
                    )
                )
        if found.exponent is not None:
            k = with_interval(found.exponent, "{:.2f}".format)
            notes.append(f"{line}: the best size grows as FLOPs to the power {k}. {found.limits}")
        else:
            notes.append(f"{line}: {found.limits}")
    picture = ""
    if groups:
        svg = figures.panels(groups, axis_name(axis))
        picture = image("isoflop", svg, f"Final loss over {axis_name(axis)} at each budget")
    head = ["line", "training FLOPs", f"best {axis_name(axis)}", "why none"]
    return "\n\n".join(filter(None, [picture, markdown_table(head, rows), *notes]))


def _clark(image: Image, study: StudyConfig, arms: Sequence[Arm]) -> str:
    runs = [run for arm in arms for run in arm.results]
    return _fitted(
        {"N": sizes_of(runs, "active_params"), "E": sizes_of(runs, "expansion")},
        [loss_of(run) for run in runs],
        CLARK,
        "N are the active parameters of the model; E the parameters of the feed-forward blocks over those "
        "that a token uses.",
        held=("E_start", "E_max"),
    )


def _granularity(image: Image, study: StudyConfig, arms: Sequence[Arm]) -> str:
    axis = axis_of(study)
    if axis is None:
        return "No fit: the study names no `axis` that is the granularity."
    parts: list[str] = []
    rows: list[list[str]] = []
    drawn: list[Line] = []
    for line in lines_over(arms, axis):
        pairs = [(x, loss) for x, losses in line.points.items() for loss in losses]
        try:
            found = fit_parabola(*zip(*pairs, strict=True))
        except ConfigError as error:
            rows.append([line.name, NONE, f"{error}"])
            continue
        best = with_interval(found.minimum, "{:.1f}".format)
        rows.append([line.name, best, found.refusal])
        drawn.append(
            Line(line.name, line.points, line.number, curve=found.curve, minimum=found.minimum)
        )
    if drawn:
        svg = figures.against(drawn, axis_name(axis))
        parts.append(image("granularity", svg, "Final loss over granularity, with parabolas"))
    parts.append(markdown_table(["line", "granularity with the lowest loss", "why none"], rows))
    every = [run for arm in arms for run in arm.results]
    runs = [run for run in every if not math.isnan(size_of(run, axis))]
    if len({run.budget.tokens for run in runs}) > 1:
        parts.append("The runs differ in their tokens, so that no form in G alone is fitted.")
    else:
        note = "At one size and one number of tokens Krajewski's form is this one in G alone."
        law = power_law("G", "granularity")
        losses = [loss_of(run) for run in runs]
        parts.append(_fitted({"G": sizes_of(runs, axis)}, losses, law, note))
    return "\n\n".join(filter(None, parts))


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
    picture = ""
    lines = [Line(n, points, k) for k, (n, points) in enumerate(drawn.items()) if len(points) > 1]
    if lines:
        svg = figures.against(lines, AXIS_NAMES["expansion"], y_label="leverage")
        picture = image("leverage", svg, "Efficiency leverage over the number of experts")
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
    variables: Mapping[str, Sequence[float]],
    losses: Sequence[float],
    law: Law,
    note: str,
    held: Sequence[str] = (),
) -> str:
    """A table of the parameters of a fit, or why there is none.

    Args:
        held: parameters that are held at their published values where the runs do not determine them.
    """
    fixed = {name: law.published[name] for name in held}
    found = None
    try:
        with suppress(ConfigError) if held else nullcontext():  # too few to determine all
            found = fit(law, variables, losses)
        if found is None or {*held} & {*found.undetermined}:
            note += (
                f" {' and '.join(held)} cannot be told from these runs, and are held as published."
            )
            found = fit(law, variables, losses, fixed=fixed)
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
"""What a study may ask for in `fit` -> title and text of its section."""
