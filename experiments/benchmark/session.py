"""Timing in turns, and the tables and targets that the benchmark prints."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table

from experiments.benchmark.layers import DENSE, Case, Layer, Tokens, dense_layer, sparse_layers
from experiments.benchmark.peers import REFERENCE, SAME
from moe_ffn.studies.timing import interleave

Key = tuple[str, str]
"""Case and name of a candidate."""

NOISY = 0.1
"""`Result.noise` above which the session warns and marks a target."""


@dataclass(frozen=True)
class Candidate:
    """A function to time; see `Timed`."""

    case: str
    name: str
    run: Callable[[], object]
    reset: Callable[[], object] = lambda: None
    calls: int = 1
    computes: str = SAME

    @property
    def key(self) -> Key:
        return self.case, self.name

    @classmethod
    def training(cls, layer: Layer, tokens: Tokens, case: str) -> Candidate:
        """Time forward and backward, with gradients of x and of all parameters."""

        def run() -> None:
            layer(tokens.x_BSD).backward(tokens.grad_BSD)

        def reset() -> None:
            tokens.x_BSD.grad = None
            layer.module.zero_grad(set_to_none=True)

        return cls(case, layer.name, run, reset, computes=layer.computes)

    @classmethod
    def evaluation(cls, layer: Layer, tokens: Tokens, case: str, calls: int = 1) -> Candidate:
        """Time forward passes without gradients."""
        x_BSD = tokens.x_BSD.detach()

        def run() -> None:
            with torch.no_grad():
                for _ in range(calls):
                    layer(x_BSD)

        return cls(case, layer.name, run, calls=calls, computes=layer.computes)


@dataclass(frozen=True)
class Result:
    """Measurement of a candidate."""

    computes: str
    unit: str
    """`s` (per call), `token/s` or `B`."""
    lower_quartile: float
    median: float
    upper_quartile: float

    @property
    def noise(self) -> float:
        """Interquartile range, relative to the median."""
        return (self.upper_quartile - self.lower_quartile) / self.median


Results = dict[Key, Result]


@dataclass
class Session:
    """A run of the benchmark: its options, its output and its targets."""

    backends: Sequence[str]
    device: torch.device
    rounds: int = 9
    patience: float = math.inf
    """See `interleave`."""
    suite: str = ""
    targets: list[list[str]] = field(default_factory=list)
    """Rows of the table of targets; see `show_targets`."""
    console: Console = field(
        # The terminal wraps long lines; without markup, names may contain brackets.
        default_factory=lambda: Console(width=400, markup=False, highlight=False, emoji=False)
    )

    @property
    def limits_apply(self) -> bool:
        """True on a CPU, for which most limits were set."""
        return self.device.type == "cpu"

    def say(self, text: str = "") -> None:
        self.console.print(text, soft_wrap=True)

    def begin(self, suite: str) -> None:
        self.suite = suite
        self.say(f"\n== {suite} ==\n")

    def layers(self, case: Case, peers: Sequence[str] = ()) -> list[Layer]:
        """Return the dense block, our layer in every backend, and the `peers` that are installed."""
        sparse = sparse_layers(case, self.backends, peers, lambda note: self.say(f"  {note}"))
        return [dense_layer(case.shape, self.device), *sparse]

    def time(
        self, candidates: Sequence[Candidate], *, more: int = 1, tokens: int | None = None
    ) -> Results:
        """Time candidates in turns, in `more` times the rounds; as tokens per second if a run has some."""
        rounds = more * self.rounds
        measured = interleave(candidates, rounds, 1, self.patience)
        done = min(map(len, measured), default=rounds)
        unit = "s"
        if tokens is not None:
            measured = [tuple(tokens / seconds for seconds in values) for values in measured]
            unit = "token/s"
        results = {
            candidate.key: result(values, unit, candidate.computes)
            for candidate, values in zip(candidates, measured, strict=True)
        }
        if done < rounds:
            self.say(f"  {done} rounds instead of {rounds}, which would take too long")
        noise = statistics.median(result.noise for result in results.values())
        if noise > NOISY:
            self.say(
                f"  noisy: the interquartile range is {noise:.0%} of the median; is this machine busy?"
            )
        return results

    def check_target(
        self,
        claim: str,
        limit: float,
        results: Results,
        numerator: Key,
        denominator: Key,
        *,
        at_most: bool = True,
        goal: float | None = None,
        anywhere: bool = False,
    ) -> None:
        """Compare the ratio of two medians with a target; print and store the result.

        The verdict is `not measured` if one of them was not timed, or computes something else. A `goal` is
        stricter than the target. The limit applies to GPUs only if `anywhere`.
        """
        if not (anywhere or self.limits_apply):
            return
        verdict = "not measured"
        figure = unusable(results, numerator) or unusable(results, denominator)
        if not figure:
            value = results[numerator].median / results[denominator].median
            is_reached = value <= limit if at_most else value >= limit
            is_noisy = max(results[numerator].noise, results[denominator].noise) > NOISY
            figure = f"{value:.3f}"
            verdict = f"{'reached' if is_reached else 'MISSED'}{', noisy' if is_noisy else ''}"
        target = f"{'at most' if at_most else 'at least'} {limit:g}"
        goal_text = "" if goal is None else f"{goal:g}"
        self.targets.append([self.suite, numerator[0], claim, figure, target, goal_text, verdict])
        more = f", goal {goal_text}" if goal_text else ""
        self.say(f"  {verdict:7} {claim}: {figure}, target {target}{more}")

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Print a table; columns of numbers, except the first column, are aligned to the right."""
        rows = list(rows)
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="")
        for column, name in enumerate(headers):
            has_numbers = any(row[column][:1].isdigit() for row in rows)
            table.add_column(name, justify="right" if column and has_numbers else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(Padding.indent(table, 2))

    def show(self, results: Results, against: Sequence[str] = (DENSE,)) -> None:
        """Print a table of results, with a column of ratios for each timed candidate in `against`."""
        columns = [name for name in against if any(found == name for _, found in results)]
        rows = [
            [
                name,
                amount(result.median, result.unit),
                f"{amount(result.lower_quartile, result.unit)} - "
                f"{amount(result.upper_quartile, result.unit)}",
                *(ratio(results, (case, name), (case, to)) for to in columns),
                result.computes,
            ]
            for (case, name), result in results.items()
        ]
        ratios = (f"/ {name}" for name in columns)
        self.table(["candidate", "median", "quartiles", *ratios, "computes"], rows)

    def show_grid(self, results: Results) -> None:
        """Print a table of medians: a row for each name, a column for each case."""
        cases = list(dict.fromkeys(case for case, _ in results))
        rows = [
            [
                name,
                *(
                    amount(results[case, name].median, results[case, name].unit)
                    if (case, name) in results
                    else "-"
                    for case in cases
                ),
                ratio(results, (cases[-1], name), (cases[0], name)),
            ]
            for name in dict.fromkeys(name for _, name in results)
        ]
        self.table(["layer", *cases, f"{cases[-1]} / {cases[0]}"], rows)

    def show_targets(self) -> None:
        """Print all targets in one table."""
        headers = ("suite", "case", "claim", "measured", "target", "goal", "verdict")
        self.table(headers, self.targets)


def result(values: Sequence[float], unit: str = "s", computes: str = SAME) -> Result:
    """Summarise measurements by their quartiles."""
    values = [*values, values[0]] if len(values) == 1 else values
    return Result(computes, unit, *statistics.quantiles(values, n=4, method="inclusive"))


def ratio(results: Results, numerator: Key, denominator: Key) -> str:
    """Return the ratio of two medians, `1.23x`; a dash if one was not timed."""
    if numerator not in results or denominator not in results:
        return "-"
    return f"{results[numerator].median / results[denominator].median:.2f}x"


def unusable(results: Results, key: Key) -> str:
    """Return the reason why a result cannot support a target; empty if it can."""
    if key not in results:
        return f"no '{key[1]}' here"
    computes = results[key].computes
    return "" if computes in (SAME, REFERENCE) else f"{key[1]} {computes}"


def amount(value: float, unit: str = "s") -> str:
    """Format a value with three digits and a unit: `12.3 ms`, `1.5 MiB`, `1,234 token/s`."""
    if unit == "B":
        return f"{value / 2**20:.1f} MiB"
    if unit != "s":
        return f"{value:,.0f} {unit}"
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    size, unit = next((found for found in units if value >= found[0]), units[-1])
    value /= size
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"
