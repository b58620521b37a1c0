"""The curves of one run: what it learned, how fast, and with which step sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from moe_ffn.balancing.losses import BALANCING_LOSSES
from moe_ffn.report.figures import DASHES, Plot, Unit, average, level, line, line_figure
from moe_ffn.runs.reader import Run, Series

MOST_POINTS = 500
"""Of a curve: more than a screen has pixels for."""

LOSS = Unit("loss (nats per token)", ".4f")
OBJECTIVE = Unit("objective (nats per token)", ".4f")
BITS = Unit("bits per byte", ".4f")
RATE = Unit("learning rate", ".3~g")
NORM = Unit("gradient norm (L2)")
SPEED = Unit("tokens per second", ",.0f")
PART = Unit("loss, before its weight", ".4~g")


def curve_plots(run: Run) -> list[Plot]:
    """Each only where it was measured."""
    plots = [
        _loss(run),
        _curve(run, "Bits per byte", BITS, {"validation": "validation/bits_per_byte"}),
        _curve(run, "Throughput", SPEED, {"training": "train/tokens_per_second"}),
        _curve(run, "Learning rate", RATE, {"learning rate": "train/learning_rate"}),
        _curve(run, "Gradient norm", NORM, {"gradient norm": "train/gradient_norm"}),
        _objective(run),
        _balancing_losses(run),
    ]
    return [plot for plot in plots if plot is not None]


def _loss(run: Run) -> Plot | None:
    unigram = run.summary.get("unigram_loss")
    keys = {"training": "train/loss", "validation": "validation/loss"}
    levels: dict[str, float] = {}
    if isinstance(unigram, int | float) and math.isfinite(unigram):
        levels["unigram model"] = unigram
    return _curve(run, "Loss", LOSS, keys, levels=levels, is_wide=True)


def _objective(run: Run) -> Plot | None:
    """Nothing where it is the loss alone."""
    loss, objective = run.series("train/loss"), run.series("train/objective")
    if objective.values.tobytes() == loss.values.tobytes():
        return None
    keys = {"objective": "train/objective", "training loss": "train/loss"}
    note = "What is minimised: the loss and the weighted balancing losses. "
    return _curve(run, "Objective", OBJECTIVE, keys, note) if objective else None


def _balancing_losses(run: Run) -> Plot | None:
    names = [name for name in sorted(BALANCING_LOSSES) if f"train/{name}" in run.rows.columns]
    notes = [note for name in names if (note := BALANCING_LOSSES[name].note)]
    keys = {name.replace("_", " "): f"train/{name}" for name in names}
    return _curve(run, "Balancing losses", PART, keys, "".join(f"{note} " for note in notes))


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
            grid = average(found[name], MOST_POINTS)
            dash = DASHES[number % len(DASHES)]
            traces.append(line(grid.steps, grid.values[0], name, unit, colour=number, dash=dash))
    span = [step for series in found.values() for step in series.steps]
    traces += [level(value, span, name, unit) for name, value in (levels or {}).items()]
    note += how_drawn(list(found.values()), MOST_POINTS)
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
