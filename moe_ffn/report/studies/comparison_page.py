"""Page that compares runs: verdicts, tables and figures of their arms."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from urllib.parse import quote

from moe_ffn.config.errors import ConfigError
from moe_ffn.metrics.table import LAYER_METRICS
from moe_ffn.report import figures, run_summary
from moe_ffn.report.drawing import style_of
from moe_ffn.report.page import report_html
from moe_ffn.report.plots import (
    OPEN_MEASURES,
    Plot,
    choice_of,
    numbered,
    plot_of,
    render_plots,
    shared_script,
)
from moe_ffn.report.studies import arm_figures
from moe_ffn.report.studies.arm_figures import AXES, LOSSES
from moe_ffn.report.studies.comparison_tables import tables, tuning_tables
from moe_ffn.runs.folder import REPORT_FILE
from moe_ffn.runs.reader import Run
from moe_ffn.studies.comparison import COSTS, Arm, Comparison
from moe_ffn.studies.differences import option_differences
from moe_ffn.studies.gather import Gathered, gather
from moe_ffn.studies.result import RunResult


def html_of_runs(
    runs: Sequence[Run], *, reload_every: float | None = None, output: Path | None = None
) -> str:
    """Return the page of runs, finished or not: of one, or a comparison of those that are comparable."""
    if len(runs) == 1:
        return report_html(runs, reload_every=reload_every, output=output)
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

    Without a comparison, `problem` gives the reason. The page at `output` links to the pages of runs and to a
    shared script, and shows balance, alarms and progress of `runs`.
    """
    arms = list(comparison.arms) if comparison else []
    arm_of_folder = gathered.arms if comparison else {}
    results = list(gathered.results)
    arm_of = {result.shown_name: result.main_arm for result in results if comparison}
    for run in runs:
        if run.folder in arm_of_folder:
            continue
        result = None
        with suppress(ConfigError):  # the options of a damaged run are missing
            result = RunResult.of_run(run).model_copy(update={"display_name": run.name})
        arms.append(Arm(run.name, [result] if result else []))
        if result is not None and run.name not in [known.shown_name for known in results]:
            results.append(result)
    numbers = {arm.name: number for number, arm in enumerate(arms)}
    runs_of_arm: dict[str, list[Run]] = {name: [] for name in numbers}
    for run in runs:
        runs_of_arm[arm_of_folder.get(run.folder, run.name)].append(run)
    differs = {arm.name: arm.differs for arm in comparison.arms} if comparison else {}
    if len(differs) < 2:
        differs = {r.shown_name: option_differences(results[0].config, r.config) for r in results}
    question = comparison.question if comparison else ""
    all_tables = [*tables(comparison), *tuning_tables(comparison)] if comparison else []
    # A page of a single arm is named after its runs.
    names = [*numbers] if len(numbers) > 1 or not runs else [run.name for run in runs]
    joined = ", ".join(names)
    folders = {**gathered.folders, **{run.name: run.folder for run in runs}}
    return render_plots(
        "runs.html",
        plots_of_arms(comparison, arms, runs_of_arm),
        script=shared_script(output) if output else None,
        reload_every=reload_every,
        title=question or (joined if len(joined) <= 80 else f"{len(names)} arms"),
        heading=question or " · ".join(names),
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
        loss_tables=all_tables[:1],
        other_tables=all_tables[1:],
        run_summary=run_summary,
    )


def plots_of_arms(
    comparison: Comparison | None, arms: Sequence[Arm], runs: Mapping[str, Sequence[Run]]
) -> dict[str, list[Plot]]:
    """Return section of `runs.html` -> its plots; without a comparison only the curves of the arms.

    The order of `arms` determines the colours; `runs` has the runs of each arm in the same order.
    """
    answer: list[Plot] = []
    tuning: list[Plot] = []
    if comparison is not None:
        if any(arm.difference for arm in comparison.arms):
            answer.append(plot_of(arm_figures.differences(comparison)))
        frontiers = {
            cost: arm_figures.frontier(comparison, cost)
            for cost, cost_of in COSTS.items()
            if all(cost_of(arm) for arm in comparison.arms)
        }
        answer += [choice_of(frontiers, choice="cost")] if frontiers else []
        tuning = [plot_of(arm_figures.tuning(comparison, tuned)) for tuned in comparison.tuning]
    curves = [
        choice_of(
            {AXES[axis]: arm_figures.losses(arms, axis, split) for axis in axes}, choice="over"
        )
        for split in LOSSES
        if (axes := arm_figures.axes_of(arms, split))
    ]
    measures = [
        plot_of(figures.overlay_measure(runs, key)) for key in OPEN_MEASURES if _moves(runs, key)
    ]
    return numbered(answer=answer, curves=curves, tuning=tuning, measures=measures)


def _moves(runs: Mapping[str, Sequence[Run]], key: str) -> bool:
    means = [figures.mean_over_layers(arm, LAYER_METRICS[key]) for arm in runs.values()]
    return len({value for series in means for value in series.values}) > 1


def _links(folders: Mapping[str, Path], page: Path) -> dict[str, str]:
    """Return name of a run -> link from `page` to the page of the run, if it exists."""
    return {
        name: quote(os.path.relpath(folder / REPORT_FILE, page.parent))
        for name, folder in folders.items()
        if (folder / REPORT_FILE).is_file()
    }
