"""Page that compares runs: verdict, tables and figures of their arms."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from moe_ffn.config.errors import ConfigError
from moe_ffn.metrics.table import LAYER_METRICS
from moe_ffn.report import arm_figures, figures, run_summary
from moe_ffn.report.arm_figures import AXES, LOSSES
from moe_ffn.report.comparison_tables import tables, tuning_tables
from moe_ffn.report.drawing import style_of
from moe_ffn.report.plots import (
    FIRST,
    Plot,
    choice_of,
    numbered,
    plot_of,
    render_plots,
    shared_script,
)
from moe_ffn.runs.folder import REPORT_FILE
from moe_ffn.runs.reader import Run
from moe_ffn.studies.comparison import COSTS, Arm, Comparison
from moe_ffn.studies.differences import option_differences
from moe_ffn.studies.gather import Gathered, gather
from moe_ffn.studies.result import RunResult


def html_of_runs(runs: Sequence[Run], output: Path | None, reload_every: float | None) -> str:
    """Return the page of runs, finished or not; it compares the runs that are comparable."""
    gathered, comparison, problem = Gathered([]), None, ""
    try:
        gathered = gather([run.folder for run in runs])
        comparison = gathered.compare()
    except ConfigError as error:
        problem = str(error)
    return comparison_html(
        gathered, comparison, output, problem=problem, runs=runs, reload_every=reload_every
    )


def comparison_html(
    gathered: Gathered,
    comparison: Comparison | None,
    output: Path | None,
    *,
    problem: str = "",
    runs: Sequence[Run] = (),
    reload_every: float | None = None,
) -> str:
    """Return the page of a comparison of runs or of committed results.

    Args:
        comparison: None if the runs cannot be compared; `problem` gives the reason.
        output: path of the page, used for links to the pages of runs and to a shared script.
        runs: runs whose balance, alarms and progress the page shows.
    """
    arms = list(comparison.arms) if comparison else []
    compared = gathered.arms if comparison else {}
    results = list(gathered.results)
    arm_of = {result.shown_name: result.main_arm for result in results if comparison}
    for run in runs:
        if run.folder in compared:
            continue
        result = None
        with suppress(ConfigError):  # the options of a damaged run are missing
            result = RunResult.of_run(run).model_copy(update={"display_name": run.name})
        arms.append(Arm(run.name, [result] if result else []))
        if result is not None and run.name not in [known.shown_name for known in results]:
            results.append(result)
    numbers = {arm.name: number for number, arm in enumerate(arms)}
    of_arms: dict[str, list[Run]] = {name: [] for name in numbers}
    for run in runs:
        of_arms[compared.get(run.folder, run.name)].append(run)
    differs = {arm.name: arm.differs for arm in comparison.arms} if comparison else {}
    if len(differs) < 2:
        differs = {r.shown_name: option_differences(results[0].config, r.config) for r in results}
    question = comparison.question if comparison else ""
    shown = [*tables(comparison), *tuning_tables(comparison)] if comparison else []
    # The name of a single arm would not name its runs.
    called = [*numbers] if len(numbers) > 1 or not runs else [run.name for run in runs]
    joined = ", ".join(called)
    folders = {**gathered.folders, **{run.name: run.folder for run in runs}}
    return render_plots(
        "runs.html",
        plots_of_arms(comparison, arms, of_arms),
        script=shared_script(output) if output else None,
        reload_every=reload_every,
        title=question or (joined if len(joined) <= 80 else f"{len(called)} arms"),
        heading=question or " · ".join(called),
        comparison=comparison,
        problem=problem,
        left_out=gathered.left_out.values(),
        differs=differs,
        runs=runs,
        results=results,
        arm_of=arm_of,
        states={run.name: run_summary.STATES[run.state][1] for run in runs},
        links=_links(folders, output) if output else {},
        number_of=numbers,
        style_of=style_of,
        loss_tables=shown[:1],
        other_tables=shown[1:],
        run_summary=run_summary,
    )


def plots_of_arms(
    comparison: Comparison | None,
    arms: Sequence[Arm],
    runs: Mapping[str, Sequence[Run]],
) -> dict[str, list[Plot]]:
    """Return section of `runs.html` -> its plots.

    Args:
        comparison: None if the runs cannot be compared; then only curves are drawn.
        arms: all arms with curves; their order determines the colours.
        runs: arm -> its runs with rows of training, in the same order.
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
    measures = [plot_of(figures.overlay_measure(runs, key)) for key in FIRST if _moves(runs, key)]
    return numbered(answer=answer, curves=curves, tuning=tuning, measures=measures)


def _moves(runs: Mapping[str, Sequence[Run]], key: str) -> bool:
    means = [figures.mean_over_layers(of_arm, LAYER_METRICS[key]) for of_arm in runs.values()]
    return len({value for series in means for value in series.values}) > 1


def _links(folders: Mapping[str, Path], page: Path) -> dict[str, str]:
    """Return name of a run -> link from `page` to the page of the run, if it exists."""
    own = {name: folder / REPORT_FILE for name, folder in folders.items()}
    return {
        name: quote(os.path.relpath(file, page.parent))
        for name, file in own.items()
        if file.is_file()
    }
