"""`metrics.csv` as one series per column, read also while a run is writing it."""

from __future__ import annotations

import csv
import io
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from moe_ffn.files import kind_of, open_file

STEP_COLUMNS = ("step", "trainer/global_step")

_MOST_STEPS = 2**53
"""What stands beyond is no step but damage: a float does not tell it from the next."""


@dataclass(frozen=True)
class Series:
    """The values of one column and their optimizer steps, ascending; a value may not be finite."""

    steps: array[float] = field(default_factory=lambda: array("d"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None

    def put(self, step: float, value: float) -> None:
        """A step that comes again was repeated by a resumed run: what it had before is void."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)


def read_metrics(path: Path) -> dict[str, Series]:
    """Every column that has a number; none where there is no file or no whole line.

    A last line without its end is being written and is left for the next look: a number cut in two
    is another number. The header may come again, with more columns, further down.
    """
    series: dict[str, Series] = {}
    if kind_of(path) is None:
        return series
    columns: list[str] = []
    with io.TextIOWrapper(open_file(path), "utf-8", errors="replace", newline="\n") as file:
        for row in (_cells(line) for line in file if line.endswith("\n")):
            if STEP_COLUMNS[0] in row:
                columns = row
            else:
                _put_row(series, dict(zip(columns, row, strict=False)))
    return series


def _cells(line: str) -> list[str]:
    # Line by line, or a stray quotation mark would make one cell of all the rest.
    try:
        return next(csv.reader([line.rstrip("\r\n")]), [])
    except csv.Error:  # a cell of a hundred thousand characters
        return []


def _put_row(series: dict[str, Series], cells: Mapping[str, str]) -> None:
    steps = (_number(cells.get(name, "")) for name in STEP_COLUMNS)
    step = next((s for s in steps if s is not None), None)
    if step is None or not 0 <= step <= _MOST_STEPS:
        return
    for name, cell in cells.items():
        value = _number(cell)
        if value is not None and name not in STEP_COLUMNS:
            if name not in series:
                series[name] = Series()
            series[name].put(step, value)


def _number(cell: str) -> float | None:
    if not cell:
        return None
    try:
        return float(cell)
    except ValueError:
        return None
