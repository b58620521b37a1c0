"""The rows of a run as a table."""

from __future__ import annotations

from array import array
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from moe_ffn.training.monitoring.json_lines import STEP_KEY, Cell, Row

if TYPE_CHECKING:
    import pandas


@dataclass(frozen=True)
class Series:
    """The values of one column and their optimizer steps, ascending; a value may not be finite."""

    steps: array[int] = field(default_factory=lambda: array("q"))
    values: array[float] = field(default_factory=lambda: array("d"))

    def __len__(self) -> int:
        return len(self.values)

    @property
    def last(self) -> float | None:
        return self.values[-1] if self.values else None

    def __repr__(self) -> str:
        if not self.steps:
            return "Series(no values)"
        span = f"steps {self.steps[0]} to {self.steps[-1]}"
        return f"Series({len(self)} values, {span}, last {self.last:.6g})"

    def put(self, step: int, value: float) -> None:
        """Append a value; a step that comes again takes the place of itself and of all that was later."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)


class Rows:
    """A table with a row for each optimizer step that has values, and a column for each key of the log.

    A list is a column for each of its entries: `routing/layer_03/load` becomes
    `routing/layer_03/load/expert_00` and on. Iterating gives one `{"step": 10, "train/loss": 2.5}` for each
    step, with the columns that have a value there.
    """

    def __init__(self, lines: Iterable[Row] = (), keys: Collection[str] | None = None) -> None:
        """
        Args:
            keys: those of the log that are read; all by default.
        """
        self.columns: dict[str, Series] = {}
        """The series of each key, in the order of the log."""
        for line in lines:
            found = line.values
            if keys is not None:
                found = {key: found[key] for key in keys if key in found}
            for key, value in flat(found).items():
                if value is not None:
                    self.columns.setdefault(key, Series()).put(line.step, value)

    def __repr__(self) -> str:
        return f"Rows({len(self)} rows, {len(self.columns)} columns)"

    def column(self, key: str) -> Series:
        """The values of one key; an empty series where no row has it."""
        return self.columns.get(key, Series())

    @property
    def steps(self) -> list[int]:
        """The optimizer steps of the rows, ascending."""
        return sorted({step for series in self.columns.values() for step in series.steps})

    def __len__(self) -> int:
        return len(self.steps)

    def __iter__(self) -> Iterator[dict[str, float]]:
        rows: dict[int, dict[str, float]] = {step: {STEP_KEY: step} for step in self.steps}
        for key, series in self.columns.items():
            for step, value in zip(series.steps, series.values, strict=True):
                rows[step][key] = value
        yield from rows.values()

    def to_pandas(self) -> pandas.DataFrame:
        """The table as a DataFrame with the step as its index; a missing value is NaN.

        Raises:
            ImportError: pandas is not installed.
        """
        import pandas

        columns = {key: pandas.Series(s.values, index=s.steps) for key, s in self.columns.items()}
        return pandas.DataFrame(columns).rename_axis(STEP_KEY)


def flat(values: Mapping[str, Cell]) -> dict[str, float | None]:
    """`{"load": [0.25, 0.75]}` as `{"load/expert_00": 0.25, "load/expert_01": 0.75}`."""
    cells: dict[str, float | None] = {}
    for key, value in values.items():
        if isinstance(value, list):
            cells |= {f"{key}/expert_{e:02d}": share for e, share in enumerate(value)}
        else:
            cells[key] = value
    return cells
