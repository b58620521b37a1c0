"""One run of the benchmark: its rounds, what it has measured so far, and how that is shown and written."""

from __future__ import annotations

import csv
import io
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import plotly.io
import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

import moe_ffn
from experiments.benchmark.layers import (
    DENSE,
    REFERENCE,
    SAME,
    Case,
    Layer,
    dense_layer,
    moe_layer,
    our_layers,
    peer_layers,
)
from experiments.benchmark.peers import PEERS
from experiments.benchmark.shapes import Shape
from experiments.benchmark.timing import Rounds, Timed, Timing, clock_for, interleave
from moe_ffn.files import write_whole

RESULTS_FILE, PROMISES_FILE, PLOTS_FILE = "results.csv", "promises.csv", "plots.html"

NOISY = 0.1
"""Quartiles this far apart, as a part of the median, are worth a word."""


@dataclass(frozen=True)
class Row:
    """One candidate of one case: a line of the results."""

    suite: str
    case: str
    candidate: str
    version: str
    """Of the library it comes from."""
    computes: str
    """The same function as ours, or not."""
    unit: str
    """`s` of one pass, `token/s`, or `B`."""
    median: float
    lower_quartile: float
    upper_quartile: float
    rounds: int
    ratio: float | None
    """Its median divided by that of `ratio_to`."""
    ratio_to: str
    shape: Shape
    """A column for each of its fields."""


@dataclass(frozen=True)
class Promise:
    """A figure that is promised to stay on one side of a limit."""

    suite: str
    case: str
    claim: str
    limit: float
    figure: float | None
    """None where it could not be measured."""
    at_most: bool = True
    goal: float | None = None
    """To be reached in the end, beyond the promise."""
    why_unmeasured: str = ""

    @property
    def verdict(self) -> str:
        if self.figure is None:
            return "not measured"
        kept = self.figure <= self.limit if self.at_most else self.figure >= self.limit
        return "kept" if kept else "MISSED"

    @property
    def shown_figure(self) -> str:
        return self.why_unmeasured if self.figure is None else f"{self.figure:.3f}"

    @property
    def shown_limit(self) -> str:
        return f"{'at most' if self.at_most else 'at least'} {self.limit:g}"


@dataclass(frozen=True)
class Point:
    """One case of a suite, and the layers that are timed at it."""

    case: str
    shape: Shape
    layers: Sequence[Layer]
    passes: Sequence[Timed]
    """Of the layers."""
    label: str = ""
    """Follows a layer's name in the names of its timings, where points are timed in the same turns."""
    to: str = DENSE
    """The layer that the others are compared with."""


@dataclass
class Session:
    """Passed from suite to suite; prints as it goes."""

    rounds: Rounds
    backends: Sequence[str]
    device: torch.device
    rows: list[Row] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    charts: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Figures of plotly by the name of the suite."""
    console: Console = field(
        # The terminal breaks lines that are too long for it; markup is off for brackets in names.
        default_factory=lambda: Console(width=400, markup=False, highlight=False, emoji=False)
    )
    _skipped: set[tuple[str, str]] = field(default_factory=set)
    _computes: dict[str, str] = field(default_factory=dict)
    """By the name of a timing, for those that `keep` was told."""

    @property
    def limits_apply(self) -> bool:
        """Whether this is a CPU, for which most limits were set."""
        return self.device.type == "cpu"

    def say(self, text: str = "") -> None:
        self.console.print(text, soft_wrap=True)

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """The first column to the left, as all that hold no numbers, the others to the right."""
        rows = list(rows)
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="")
        for column, name in enumerate(headers):
            has_numbers = any(row[column][:1].isdigit() for row in rows)
            table.add_column(name, justify="right" if column and has_numbers else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(Padding.indent(table, 2))

    def skip(self, name: str, reason: str) -> None:
        """Says why a candidate is left out, once."""
        if (name, reason) not in self._skipped:
            self._skipped.add((name, reason))
            self.say(f"  skipped: {name}: {reason}")

    # ------------------------------------------------------------------------- layers and times

    def case(self, shape: Shape) -> Case:
        """Fresh weights and tokens, the same in every run."""
        torch.manual_seed(0)
        return Case.of(shape, moe_layer(shape, "loop", self.device), self.device)

    def sparse_layers(self, case: Case, peers: Sequence[str]) -> list[Layer]:
        """Ours in every backend, and those of `peers` that are there."""
        mine = our_layers(case, self.backends, self.skip)
        return [*mine, *peer_layers(case, peers, self.skip)]

    def layers(self, case: Case, peers: Sequence[str]) -> list[Layer]:
        """The dense block first, then the sparse ones."""
        return [dense_layer(case.shape, self.device), *self.sparse_layers(case, peers)]

    def time(self, candidates: Mapping[str, Timed], *, more: int = 1) -> dict[str, Timing]:
        """In turns; `more` times as many rounds where a ratio has to be known more exactly."""
        rounds = replace(self.rounds, timed=more * self.rounds.timed)
        timings = interleave(candidates, rounds, clock_for(self.device))
        done = min((len(timing.values) for timing in timings.values()), default=rounds.timed)
        if done < rounds.timed:
            self.say(f"  {done} rounds instead of {rounds.timed}, which would take long")
        noise = statistics.median(timing.noise for timing in timings.values()) if timings else 0
        if noise > NOISY:
            self.say(
                f"  noisy: the quartiles lie {noise:.0%} of the median apart; is this machine busy?"
            )
        return timings

    def time_points(
        self,
        suite: str,
        points: Sequence[Point],
        *,
        more: int = 1,
        beside: Mapping[str, Timed] | None = None,
    ) -> dict[str, Timing]:
        """All layers of all points, and what is `beside` them, in the same turns; keeps a row of each."""
        candidates = {
            layer.name + point.label: timed
            for point in points
            for layer, timed in zip(point.layers, point.passes, strict=True)
        }
        timings = self.time({**candidates, **(beside or {})}, more=more)
        for point in points:
            self.keep(suite, point.case, point.shape, point.layers, timings, point.to, point.label)
        return timings

    # ----------------------------------------------------------------------- rows and promises

    def keep(
        self,
        suite: str,
        case: str,
        shape: Shape,
        layers: Sequence[Layer],
        timings: Mapping[str, Timing],
        to: str = DENSE,
        label: str = "",
        unit: str = "s",
    ) -> None:
        """Rows of the CSV; `label` follows a layer's name in the names of the timings."""
        for layer in layers:
            timing = timings[layer.name + label]
            self._computes[layer.name + label] = layer.computes
            self.rows.append(
                Row(
                    *(suite, case, layer.name, version_of(layer.name), layer.computes, unit),
                    *(timing.median, *timing.quartiles, len(timing.values)),
                    *(ratio(timings, layer.name + label, to + label), to, shape),
                )
            )

    def promise(
        self,
        suite: str,
        case: str,
        claim: str,
        limit: float,
        timings: Mapping[str, Timing],
        pair: tuple[str, str],
        *,
        at_most: bool = True,
        goal: float | None = None,
        anywhere: bool = False,
        reason: str = "",
    ) -> None:
        """A promise of one median over another, shown and kept for the summary.

        Not measured where one of the two was not timed or computes something else, or for a `reason`.
        Limits were set on CPUs and are left out elsewhere, except those that hold `anywhere`.
        """
        if not (anywhere or self.limits_apply):
            return
        why = reason or next(filter(None, (self._why_not(timings, name) for name in pair)), "")
        figure = None if why else ratio(timings, *pair)
        promise = Promise(suite, case, claim, limit, figure, at_most, goal, why)
        self.promises.append(promise)
        beyond = "" if goal is None else f", goal {goal:g}"
        self.say(
            f"  {promise.verdict:7} {claim}: {promise.shown_figure}, "
            f"promised {promise.shown_limit}{beyond}"
        )

    def _why_not(self, timings: Mapping[str, Timing], name: str) -> str:
        if name not in timings:
            return f"no '{name}' here"
        computes = self._computes.get(name, SAME)
        return "" if computes in (SAME, REFERENCE) else f"{name} {computes}"

    def summarize(self) -> None:
        """All promises in one table."""
        headers = ("suite", "case", "what", "measured", "promised", "goal", "verdict")
        self.table(
            headers,
            [
                [
                    *(promise.suite, promise.case, promise.claim),
                    *(promise.shown_figure, promise.shown_limit),
                    *("" if promise.goal is None else f"{promise.goal:g}", promise.verdict),
                ]
                for promise in self.promises
            ],
        )


def version_of(candidate: str) -> str:
    """Of the library that a candidate comes from."""
    if candidate in PEERS:
        return PEERS[candidate].version
    plain = candidate == DENSE or candidate.startswith("plain ")
    return torch.__version__ if plain else moe_ffn.__version__


def ratio(timings: Mapping[str, Timing], name: str, to: str) -> float | None:
    """By medians; None where one of the two was not timed."""
    if name not in timings or to not in timings:
        return None
    return timings[name].median / timings[to].median


# --------------------------------------------------------------------------------------- cells


def duration(seconds: float) -> str:
    """`12.3 ms`: three digits and a unit."""
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    size, unit = next((found for found in units if seconds >= found[0]), units[-1])
    value = seconds / size
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def spread(timing: Timing) -> str:
    """The quartiles, `12.1 - 12.9 ms`."""
    lower, upper = (duration(seconds) for seconds in timing.quartiles)
    same_unit = lower.split()[1] == upper.split()[1]
    return f"{lower.split()[0] if same_unit else lower} - {upper}"


def times(value: float | None) -> str:
    """A ratio, `1.23x`; a dash where there is none."""
    return "-" if value is None else f"{value:.2f}x"


# --------------------------------------------------------------------------------------- files

SYMBOLS = ("circle", "square", "diamond", "triangle-up", "cross", "x", "star", "hexagon")
"""Beside the colour, for people who see no red or green."""


def chart(
    title: str,
    x_label: str,
    y_label: str,
    series: Mapping[str, Sequence[tuple[float, float]]],
    x_names: Sequence[str] = (),
) -> dict[str, Any]:
    """A figure of plotly: lines of (x, y) over logarithmic axes.

    Args:
        x_names: the labels under x = 1, 2, ... where x counts cases; the points are then not joined.
    """
    ticks = sorted({x for line in series.values() for x, _ in line})
    x_axis: dict[str, Any] = {
        "type": "log",
        "tickvals": ticks,
        "ticktext": [f"{x:,g}" for x in ticks],
    }
    if x_names:
        places = list(range(1, len(x_names) + 1))
        x_axis = {"tickvals": places, "ticktext": list(x_names), "range": [0.5, len(x_names) + 0.5]}
    lines = [
        {
            "type": "scatter",
            "name": name,
            "x": [x for x, _ in line],
            "y": [y for _, y in line],
            "mode": "markers" if x_names else "lines+markers",
            "marker": {"symbol": SYMBOLS[number % len(SYMBOLS)], "size": 9},
        }
        for number, (name, line) in enumerate(series.items())
    ]
    layout = {
        "title": {"text": title},
        "xaxis": {**x_axis, "title": {"text": x_label}},
        "yaxis": {"type": "log", "title": {"text": y_label}, "dtick": "D2"},
        "height": 500,
    }
    return {"data": lines, "layout": layout}


def plots_page(charts: Mapping[str, dict[str, Any]]) -> str:
    """A page that opens from disk, plotly's script in it."""
    parts = [
        plotly.io.to_html(figure, full_html=False, include_plotlyjs=number == 0)
        for number, figure in enumerate(charts.values())
    ]
    title = "<title>Benchmark of moe_ffn</title>"
    return "\n".join(["<!DOCTYPE html>", '<meta charset="utf-8">', title, *parts, ""])


def write_rows(path: Path, rows: Sequence[Row], machine: Mapping[str, str]) -> None:
    """One line a row, each with the machine and the versions, so that files can be put together."""
    names = [field.name for part in (Row, Shape) for field in fields(part) if field.name != "shape"]
    lines = ({**vars(row), **asdict(row.shape), **machine} for row in rows)
    _write(path, [*names, *machine], lines)


def write_promises(path: Path, promises: Sequence[Promise]) -> None:
    names = [field.name for field in fields(Promise)]
    lines = ({**asdict(promise), "verdict": promise.verdict} for promise in promises)
    _write(path, [*names, "verdict"], lines)


def _write(path: Path, names: Sequence[str], lines: Iterable[Mapping[str, object]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_whole(path, text.getvalue())
