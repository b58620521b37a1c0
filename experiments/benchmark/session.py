"""One run of the benchmark: candidates timed in turns; results and promises shown and written."""

from __future__ import annotations

import csv
import io
import math
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

import moe_ffn
from experiments.benchmark.layers import (
    DENSE,
    Case,
    Layer,
    Tokens,
    dense_layer,
    sparse_layers,
)
from experiments.benchmark.peers import PEERS, REFERENCE, SAME
from experiments.benchmark.shapes import Shape
from moe_ffn.files import write_whole
from moe_ffn.studies.timing import interleave

Key = tuple[str, str]
"""The case and the name of a candidate."""


@dataclass(frozen=True)
class Candidate:
    """Something to time."""

    case: str
    name: str
    shape: Shape
    run: Callable[[], object]
    reset: Callable[[], object] = lambda: None
    """Called after every run, off the clock."""
    calls: int = 1
    """Calls within one `run`; a single one may be too short for the clock."""
    computes: str = SAME

    @classmethod
    def training(cls, layer: Layer, tokens: Tokens, shape: Shape, case: str = "") -> Candidate:
        """Forward and backward, to x and to all parameters; the gradients are freed off the clock."""

        def run() -> None:
            layer(tokens.x_BSD).backward(tokens.grad_BSD)

        def reset() -> None:
            tokens.x_BSD.grad = None
            layer.module.zero_grad(set_to_none=True)

        return cls(case or str(shape), layer.name, shape, run, reset, computes=layer.computes)


@dataclass(frozen=True)
class Result:
    """The measurement of a candidate: a line of `results.csv`."""

    suite: str
    case: str
    candidate: str
    version: str
    """The version of the library that it comes from."""
    computes: str
    unit: str
    """`s` of one pass, `token/s`, or `B`."""
    median: float
    lower_quartile: float
    upper_quartile: float
    rounds: int
    ratio: float | None
    """Its median over that of `ratio_to`, a candidate of the same case."""
    ratio_to: str
    shape: Shape
    """A column for each of its fields."""

    @property
    def noise(self) -> float:
        """Distance of the quartiles, as a fraction of the median."""
        return (self.upper_quartile - self.lower_quartile) / self.median


Results = dict[Key, Result]


@dataclass(frozen=True)
class Promise:
    """A figure with a limit that it is promised to keep."""

    suite: str
    case: str
    claim: str
    limit: float
    figure: float | None
    """None where it could not be measured."""
    at_most: bool = True
    goal: float | None = None
    """The value to reach in the end, beyond the promise."""
    why_unmeasured: str = ""
    noise: float = 0.0
    """`Result.noise` of the noisier of the two results."""

    @property
    def verdict(self) -> str:
        if self.figure is None:
            return "not measured"
        kept = self.figure <= self.limit if self.at_most else self.figure >= self.limit
        noisy = ", noisy" if self.noise > NOISY else ""
        return f"{'kept' if kept else 'MISSED'}{noisy}"

    @property
    def cells(self) -> list[str]:
        """Its row in the table of promises."""
        figure = self.why_unmeasured if self.figure is None else f"{self.figure:.3f}"
        limit = f"{'at most' if self.at_most else 'at least'} {self.limit:g}"
        goal = "" if self.goal is None else f"{self.goal:g}"
        return [self.suite, self.case, self.claim, figure, limit, goal, self.verdict]


# ----------------------------------------------------------------------------------- measuring

NOISY = 0.1
"""`Result.noise` from which on a remark is printed, and a promise about it is marked."""


@dataclass
class Session:
    """One run of suites: its options, and the results and promises so far; prints as it goes."""

    backends: Sequence[str]
    device: torch.device
    rounds: int = 9
    warmup: int = 1
    patience: float = math.inf
    """See `interleave`."""
    suite: str = ""
    """The name of the suite that is running."""
    results: list[Result] = field(default_factory=list)
    promises: list[Promise] = field(default_factory=list)
    console: Console = field(
        # The terminal breaks lines that are too long for it; markup is off for brackets in names.
        default_factory=lambda: Console(width=400, markup=False, highlight=False, emoji=False)
    )
    _notes: set[str] = field(default_factory=set)

    @property
    def limits_apply(self) -> bool:
        """Whether this is a CPU, for which most limits were set."""
        return self.device.type == "cpu"

    def say(self, text: str = "") -> None:
        self.console.print(text, soft_wrap=True)

    def begin(self, suite: str) -> None:
        self.suite = suite
        self.say(f"\n== {suite} ==\n")

    def note(self, text: str) -> None:
        """Print a remark, the first time that it is made."""
        if text not in self._notes:
            self._notes.add(text)
            self.say(f"  {text}")

    def table(self, headers: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
        """Columns of numbers are aligned to the right, except the first."""
        rows = list(rows)
        table = Table(box=SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="")
        for column, name in enumerate(headers):
            has_numbers = any(row[column][:1].isdigit() for row in rows)
            table.add_column(name, justify="right" if column and has_numbers else "left")
        for row in rows:
            table.add_row(*row)
        self.console.print(Padding.indent(table, 2))

    def layers(self, case: Case, peers: Sequence[str] = ()) -> list[Layer]:
        """The dense block first, then ours in every backend, then those of `peers` that are installed."""
        sparse = sparse_layers(case, self.backends, peers, self.note)
        return [dense_layer(case.shape, self.device), *sparse]

    def time(
        self,
        candidates: Sequence[Candidate],
        to: str = DENSE,
        *,
        more: int = 1,
        tokens: int | None = None,
    ) -> Results:
        """Time candidates in turns; keep the results, compared with the candidate `to` of the same case.

        Args:
            more: factor of the number of rounds, where a ratio has to be known more exactly.
            tokens: tokens of a run; results are then tokens per second.
        """
        rounds = more * self.rounds
        measured = interleave(candidates, rounds, self.warmup, self.patience)
        done = min(map(len, measured), default=rounds)
        if tokens is not None:
            measured = [tuple(tokens / seconds for seconds in values) for values in measured]
        unit = "s" if tokens is None else "token/s"
        results = self.keep(zip(candidates, measured, strict=True), to, unit)
        if done < rounds:
            self.say(f"  {done} rounds instead of {rounds}, which would take long")
        noise = statistics.median(result.noise for result in results.values())
        if noise > NOISY:
            self.say(
                f"  noisy: the quartiles lie {noise:.0%} of the median apart; is this machine busy?"
            )
        return results

    def keep(
        self,
        measured: Iterable[tuple[Candidate, tuple[float, ...]]],
        to: str = DENSE,
        unit: str = "s",
    ) -> Results:
        """Turn measurements into results, and keep them for the CSV."""
        found = [(candidate, quartiles(values), len(values)) for candidate, values in measured]
        medians = {(candidate.case, candidate.name): m for candidate, (_, m, _), _ in found}
        results: Results = {}
        for candidate, (lower, median, upper), rounds in found:
            case, name = candidate.case, candidate.name
            base = medians.get((case, to))
            results[case, name] = Result(
                suite=self.suite,
                case=case,
                candidate=name,
                version=version_of(name),
                computes=candidate.computes,
                unit=unit,
                median=median,
                lower_quartile=lower,
                upper_quartile=upper,
                rounds=rounds,
                ratio=base and median / base,
                ratio_to=to,
                shape=candidate.shape,
            )
        self.results += results.values()
        return results

    def promise(
        self,
        claim: str,
        limit: float,
        results: Results,
        of: Key,
        to: Key,
        *,
        at_most: bool = True,
        goal: float | None = None,
        anywhere: bool = False,
    ) -> None:
        """Check, show and keep a promise about the median of one result over that of another.

        Not measured where one of the two was not timed or computes something else. Limits were set on CPUs
        and are left out elsewhere, except those that hold `anywhere`.
        """
        if not (anywhere or self.limits_apply):
            return
        why = next(filter(None, (why_not(results, key) for key in (of, to))), "")
        figure = None if why else ratio(results, of, to)
        noise = 0.0 if why else max(results[of].noise, results[to].noise)
        self.promises.append(
            Promise(self.suite, of[0], claim, limit, figure, at_most, goal, why, noise)
        )
        *_, shown, promised, aim, verdict = self.promises[-1].cells
        beyond = f", goal {aim}" if aim else ""
        self.say(f"  {verdict:7} {claim}: {shown}, promised {promised}{beyond}")

    # -------------------------------------------------------------------------------- showing

    def show(self, results: Results, against: Sequence[str] = (DENSE,)) -> None:
        """A table of results, with a column of ratios for each candidate in `against` that was timed."""
        columns = [name for name in against if any(found == name for _, found in results)]
        rows = [
            [
                name,
                amount(result.median, unit := result.unit),
                f"{amount(result.lower_quartile, unit)} - {amount(result.upper_quartile, unit)}",
                *(times(ratio(results, (case, name), (case, to))) for to in columns),
                result.computes,
            ]
            for (case, name), result in results.items()
        ]
        ratios = (f"/ {name}" for name in columns)
        self.table(["candidate", "median", "quartiles", *ratios, "computes"], rows)

    def show_grid(self, results: Results) -> None:
        """Show a table of medians: a row for each name, a column for each case."""
        cases = list(dict.fromkeys(case for case, _ in results))
        names = list(dict.fromkeys(name for _, name in results))
        found = {name: {case: results.get((case, name)) for case in cases} for name in names}
        rows = [
            [
                name,
                *("-" if result is None else amount(result.median) for result in line.values()),
                times(ratio(results, (cases[-1], name), (cases[0], name))),
            ]
            for name, line in found.items()
        ]
        self.table(["layer", *cases, f"{cases[-1]} / {cases[0]}"], rows)

    def summarize(self) -> None:
        """All promises in one table."""
        headers = ("suite", "case", "what", "measured", "promised", "goal", "verdict")
        self.table(headers, [promise.cells for promise in self.promises])


def quartiles(values: Sequence[float]) -> tuple[float, float, float]:
    """The lower one, the median and the upper one."""
    if len(values) == 1:
        return values[0], values[0], values[0]
    lower, median, upper = statistics.quantiles(values, n=4, method="inclusive")
    return lower, median, upper


def ratio(results: Results, of: Key, to: Key) -> float | None:
    """The ratio of two medians; None where one of them was not timed."""
    return results[of].median / results[to].median if of in results and to in results else None


def profiled(step: Callable[[], object], times: int) -> Sequence[Any]:
    """What torch's profiler counts of each operator on the CPU, over some steps."""
    # Otherwise the profiler announces itself, line by line.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    with profile(activities=[ProfilerActivity.CPU]) as watched:
        for _ in range(times):
            step()
    return watched.key_averages()


def why_not(results: Results, key: Key) -> str:
    """Why a result can't be used for a promise; empty where it can."""
    if key not in results:
        return f"no '{key[1]}' here"
    computes = results[key].computes
    return "" if computes in (SAME, REFERENCE) else f"{key[1]} {computes}"


def amount(value: float, unit: str = "s") -> str:
    """`12.3 ms`: three digits and a unit; `1.5 MiB`; `1,234 token/s`."""
    if unit == "B":
        return f"{value / 2**20:.1f} MiB"
    if unit != "s":
        return f"{value:,.0f} {unit}"
    units = ((1.0, "s"), (1e-3, "ms"), (1e-6, "us"))
    size, unit = next((found for found in units if value >= found[0]), units[-1])
    value /= size
    digits = 0 if value >= 99.95 else 1 if value >= 9.995 else 2
    return f"{value:.{digits}f} {unit}"


def times(value: float | None) -> str:
    """A ratio, `1.23x`; a dash where there is none."""
    return "-" if value is None else f"{value:.2f}x"


# --------------------------------------------------------------------------------------- files


def write_files(session: Session, folder: Path, machine: Mapping[str, str]) -> None:
    """Write `results.csv`, each line with the machine and versions, and `promises.csv`."""
    parts = (*fields(Result)[:-1], *fields(Shape))
    lines = ({**vars(r), **asdict(r.shape), **machine} for r in session.results)
    write_csv(folder / "results.csv", [*(part.name for part in parts), *machine], lines)
    promises = ({**asdict(promise), "verdict": promise.verdict} for promise in session.promises)
    names = [*(field.name for field in fields(Promise)), "verdict"]
    write_csv(folder / "promises.csv", names, promises)


def write_csv(path: Path, names: Sequence[str], lines: Iterable[Mapping[str, Any]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_whole(path, text.getvalue())


def version_of(candidate: str) -> str:
    """The version of the library that a candidate comes from."""
    if candidate in PEERS:
        return PEERS[candidate].version
    return moe_ffn.__version__ if candidate.startswith("moe_ffn") else torch.__version__
