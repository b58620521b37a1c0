"""The page of several runs: verdict, tables and figures of their arms."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

from moe_ffn.config.errors import ConfigError
from moe_ffn.metrics.table import LAYER_METRICS
from moe_ffn.report import arm_figures, figures, run_summary
from moe_ffn.report.arm_figures import AXES, LOSSES, ArmCurves, curves_of
from moe_ffn.report.comparison_tables import tables as tables_of
from moe_ffn.report.comparison_tables import tuning_tables
from moe_ffn.report.drawing import style_of
from moe_ffn.report.html import write_page
from moe_ffn.report.plots import (
    FIRST,
    Plot,
    choice_of,
    numbered,
    plot_of,
    render_plots,
    shared_script,
)
from moe_ffn.runs.folder import REPORT_FILE, explaining
from moe_ffn.runs.reader import Run
from moe_ffn.runs.rows import Series
from moe_ffn.studies.comparison import COSTS, Comparison
from moe_ffn.studies.differences import what_differs
from moe_ffn.studies.gather import Gathered, gather
from moe_ffn.studies.result import Curve, RunResult


@dataclass(frozen=True)
class Compared:
    """Contents of a page of several runs."""

    comparison: Comparison | None
    """Comparison of the finished runs; None where they do not compare."""
    problem: str = ""
    """Reason why they do not compare."""
    arms: Sequence[ArmCurves] = ()
    """Arms of the comparison, then each run outside it; their place gives the colour."""
    results: Sequence[RunResult] = ()
    left_out: Sequence[str] = ()
    """Reason for each run that is not in the comparison."""
    runs: Sequence[Run] = ()
    """Runs whose folders exist."""
    arm_names: Sequence[str] = ()
    """Name of the arm of each run."""


def write_comparison_page(
    comparison: Comparison,
    results: Sequence[RunResult],
    path: Path,
    folders: Mapping[str, Path] | None = None,
) -> None:
    """Write the page of a comparison of runs, or of their committed results.

    Args:
        folders: shown name of a result -> folder of its run, for a link to its page.

    Raises:
        ConfigError: `path` cannot be written.
    """
    found = Compared(comparison, arms=curves_of(comparison.arms), results=results)
    html = comparison_html(found, links=links_to(folders or {}, path), script=shared_script(path))
    with explaining(f"'{path}' cannot be written", "choose another file"):
        write_page(path, html)


def comparison_html(
    found: Compared,
    *,
    links: Mapping[str, str] | None = None,
    reload_every: float | None = None,
    script: str | None = None,
) -> str:
    """Return the page.

    Args:
        links: name of a run -> its own page.
        script: see `render_plots`.
    """
    names = [arm.name for arm in found.arms]
    of_arms: dict[str, list[Run]] = {name: [] for name in names}
    for name, run in zip(found.arm_names, found.runs, strict=True):
        of_arms[name].append(run)
    plots = plots_of_arms(found.comparison, found.arms, of_arms)
    comparison, runs = found.comparison, found.runs
    differs = {arm.name: arm.differs for arm in comparison.arms} if comparison else {}
    if len(differs) < 2:
        differs = {run.name: what_differs(runs[0].options, run.options) for run in runs}
    question = comparison.question if comparison else ""
    shown = [*tables_of(comparison), *tuning_tables(comparison)] if comparison else []
    # Several runs of one arm have no other name together.
    called = names if len(names) > 1 or not runs else [run.name for run in runs]
    joined = ", ".join(called)
    return render_plots(
        "runs.html",
        plots,
        script=script,
        reload_every=reload_every,
        title=question or (joined if len(joined) <= 80 else f"{len(called)} arms"),
        found=found,
        comparison=comparison,
        differs=differs,
        heading=question or " · ".join(called),
        runs=runs,
        links=links or {},
        number_of={name: number for number, name in enumerate(names)},
        style_of=style_of,
        loss_tables=shown[:1],
        other_tables=shown[1:],
        run_summary=run_summary,
    )


def plots_of_arms(
    comparison: Comparison | None,
    arms: Sequence[ArmCurves],
    runs: Mapping[str, Sequence[Run]],
) -> dict[str, list[Plot]]:
    """Return section of `runs.html` -> its plots.

    Args:
        comparison: None where the runs do not compare, so that only their curves are drawn.
        arms: all arms with curves, in the order that gives them their colours.
        runs: runs of each arm whose routing over training is known, in that order.
    """
    answer: list[Plot] = []
    tuning: list[Plot] = []
    if comparison is not None:
        if any(arm.difference for arm in comparison.arms):
            answer.append(plot_of(arm_figures.differences(comparison)))
        known = [c for c, of in COSTS.items() if all(of(arm) for arm in comparison.arms)]
        costs = {cost: arm_figures.frontier(comparison, cost) for cost in known}
        answer += [choice_of(costs, choice="cost")] if costs else []
        tuning = [plot_of(arm_figures.tuning(comparison, found)) for found in comparison.tuning]
    curves = [
        choice_of({AXES[axis]: arm_figures.losses(arms, axis, of) for axis in axes}, choice="over")
        for of in LOSSES
        if (axes := arm_figures.axes_of(arms, of))
    ]
    moving = [key for key in FIRST if _moves(runs, key)]
    measures = [plot_of(figures.overlay_measure(runs, key)) for key in moving]
    return numbered(answer=answer, curves=curves, tuning=tuning, measures=measures)


def _moves(runs: Mapping[str, Sequence[Run]], key: str) -> bool:
    means = [figures.mean_over_layers(of_arm, LAYER_METRICS[key]) for of_arm in runs.values()]
    return len({value for series in means for value in series.values}) > 1


def links_to(folders: Mapping[str, Path], page: Path) -> dict[str, str]:
    """Return name of a run -> link from `page` to its own page, where that exists."""
    own = {name: folder / REPORT_FILE for name, folder in folders.items()}
    return {
        name: quote(os.path.relpath(file, page.parent))
        for name, file in own.items()
        if file.is_file()
    }


def compare_runs(runs: Sequence[Run]) -> Compared:
    """Compare runs, as far as their folders allow, finished or not."""
    comparison, problem = None, ""
    gathered = Gathered([])
    try:
        gathered = gather([run.folder for run in runs])
        comparison = gathered.compare()
    except ConfigError as error:
        problem = str(error)
    arms = curves_of(comparison.arms) if comparison else []
    compared = gathered.arms if comparison else {}
    arms += [_curves_of(run) for run in runs if run.folder not in compared]
    return Compared(
        comparison,
        problem,
        arms,
        gathered.results,
        [*gathered.left_out.values()],
        runs,
        [compared.get(run.folder, run.name) for run in runs],
    )


def _curves_of(run: Run) -> ArmCurves:
    """Return the losses of a run outside the comparison, over its steps and the costs that it knows."""
    try:
        own = RunResult.of_run(run)
    except ConfigError:
        validation, train = (
            _over_steps(run.series(f"{row}/loss")) for row in ("validation", "train")
        )
        return ArmCurves(run.name, [validation], [train])
    return ArmCurves(run.name, [own.validation], [own.train], own.budget.model.flops_per_token)


def _over_steps(series: Series) -> Curve:
    finite = [value if math.isfinite(value) else None for value in series.values]
    return Curve(steps=list(series.steps), losses=finite)
