"""The curves of one run: what it learned, how fast, and with which step sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moe_ffn.balancing.losses import BALANCING_LOSSES
from moe_ffn.metrics.table import RUN_METRICS, Metric
from moe_ffn.report.figures import DASHES, Plot, Unit, average, level, line, line_figure, unit_of
from moe_ffn.runs.reader import Run, Series

MAX_POINTS = 500
"""Of a curve: more than a screen has pixels for."""

ROW_NAMES = {"train": "training", "validation": "validation"}


def curve_plots(run: Run) -> list[Plot]:
    """Each metric of the model that was measured, and the balancing losses."""
    plots = [*(_metric(run, metric) for metric in RUN_METRICS.values()), _balancing_losses(run)]
    return [plot for plot in plots if plot is not None]


def _metric(run: Run, metric: Metric) -> Plot | None:
    """None where it was always 0, as the steps skipped."""
    if metric.key == "objective":
        return _objective(run, metric)
    alone = metric.quantity if len(metric.rows) == 1 else ""
    keys = {alone or ROW_NAMES[row]: f"{row}/{metric.key}" for row in metric.rows}
    if not any(value for key in keys.values() for value in run.series(key).values):
        return None
    unigram = run.summary.unigram_loss
    is_loss = metric.key == "loss"
    levels = {"unigram model": unigram} if is_loss and unigram is not None else None
    return _curve(run, metric.title, unit_of(metric), keys, levels=levels, is_wide=is_loss)


def _objective(run: Run, metric: Metric) -> Plot | None:
    """None where it is the loss alone."""
    loss, objective = run.series("train/loss"), run.series("train/objective")
    if not objective or objective.values.tobytes() == loss.values.tobytes():
        return None
    keys = {"objective": "train/objective", "training loss": "train/loss"}
    return _curve(run, metric.title, unit_of(metric), keys, f"{metric.sentence} ")


def _balancing_losses(run: Run) -> Plot | None:
    names = [name for name in sorted(BALANCING_LOSSES) if f"train/{name}" in run.rows.columns]
    notes = [note for name in names if (note := BALANCING_LOSSES[name].note)]
    keys = {name.replace("_", " "): f"train/{name}" for name in names}
    unit = Unit("loss, before its weight", ",.4~g")
    return _curve(run, "Balancing losses", unit, keys, "".join(f"{note} " for note in notes))


def _curve(
    run: Run,
    title: str,
    unit: Unit,
    keys: Mapping[str, str],
    note: str = "",
    *,
    levels: Mapping[str, float] | None = None,
    is_wide: bool = False,
) -> Plot | None:
    found = {name: series for name, key in keys.items() if (series := run.series(key))}
    if not found:
        return None
    traces = []
    for number, name in enumerate(keys):
        if name in found:
            grid = average(found[name], MAX_POINTS)
            dash = DASHES[number % len(DASHES)]
            traces.append(line(grid.steps, grid.values[0], name, unit, colour=number, dash=dash))
    span = [step for series in found.values() for step in series.steps]
    traces += [level(value, span, name, unit) for name, value in (levels or {}).items()]
    note += how_drawn(list(found.values()), MAX_POINTS)
    return Plot(title, {"": line_figure(traces, unit)}, note, is_wide)


def how_drawn(found: Sequence[Series], most: int) -> str:
    """Says so where points are means of rows, and where a value could not be drawn."""
    notes: list[str] = []
    longest = max(map(len, found))
    if longest > most:
        notes.append(f"Each point is the mean of about {longest / most:.0f} rows.")
    if any(not math.isfinite(value) for series in found for value in series.values):
        notes.append("Where a value was NaN or infinite, nothing is drawn.")
    return " ".join(notes)
