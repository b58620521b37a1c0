"""What is kept of a measurement, and how it is shown: tables, promises and CSV."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path

from experiments.benchmark.timing import Timing
from moe_ffn.files import write_whole

RESULTS_FILE = "results.csv"
PROMISES_FILE = "promises.csv"


@dataclass(frozen=True)
class Row:
    """One candidate of one case."""

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
    num_tokens: int
    d_model: int
    d_ff: int
    num_experts: int
    k: int
    dtype: str


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
    """What is to be reached in the end, beyond the promise."""
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

    def cells(self) -> list[str]:
        """Its line under `PROMISE_HEADERS`."""
        goal = "" if self.goal is None else f"{self.goal:g}"
        columns = [self.suite, self.case, self.claim, self.shown_figure, self.shown_limit, goal]
        return [*columns, self.verdict]


PROMISE_HEADERS = ("suite", "case", "what", "measured", "promised", "goal", "verdict")


def ratio(timings: Mapping[str, Timing], name: str, to: str) -> float | None:
    """By medians; None where one of the two was not timed."""
    if name not in timings or to not in timings:
        return None
    return timings[name].median / timings[to].median


# ---------------------------------------------------------------------------------------- tables


def table(headers: Sequence[str], rows: Iterable[Sequence[str]], indent: str = "  ") -> str:
    """Aligned columns: the first to the left, as all that hold no numbers, the others to the right."""
    lines = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(headers))]
    left = [
        column == 0 or not any(_is_number(line[column]) for line in lines[1:])
        for column in range(len(headers))
    ]
    rendered = [
        "  ".join(
            cell.ljust(width) if to_left else cell.rjust(width)
            for cell, width, to_left in zip(line, widths, left, strict=True)
        ).rstrip()
        for line in lines
    ]
    rendered.insert(1, "-" * max(len(line) for line in rendered))
    return "\n".join(indent + line for line in rendered)


def _is_number(cell: str) -> bool:
    return cell[:1].isdigit()


def duration(seconds: float) -> str:
    """`12.3 ms`: three digits and a unit."""
    for size, unit in ((1.0, "s"), (1e-3, "ms")):
        if seconds >= size:
            return f"{_three_digits(seconds / size)} {unit}"
    return f"{_three_digits(seconds / 1e-6)} us"


def spread(timing: Timing) -> str:
    """The quartiles, `12.1 - 12.9 ms`."""
    lower, upper = (duration(seconds) for seconds in timing.quartiles)
    same_unit = lower.split()[1] == upper.split()[1]
    return f"{lower.split()[0] if same_unit else lower} - {upper}"


def times(value: float | None) -> str:
    """A ratio, `1.23x`; a dash where there is none."""
    return "-" if value is None else f"{value:.2f}x"


def _three_digits(value: float) -> str:
    return (
        f"{value:.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
    )


# ------------------------------------------------------------------------------------------- CSV


def write_rows(path: Path, rows: Sequence[Row], machine: Mapping[str, str]) -> None:
    """One line a row, each with the machine and the versions, so that files can be put together."""
    names = [field.name for field in fields(Row)]
    _write(path, [*names, *machine], ({**asdict(row), **machine} for row in rows))


def write_promises(path: Path, promises: Sequence[Promise]) -> None:
    names = [field.name for field in fields(Promise)]
    lines = ({**asdict(promise), "verdict": promise.verdict} for promise in promises)
    _write(path, [*names, "verdict"], lines)


def _write(path: Path, names: Sequence[str], lines: Iterable[Mapping[str, object]]) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    write_whole(path, text.getvalue())
