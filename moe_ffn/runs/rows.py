"""Table of the metrics of a run."""

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
    """Values of a column with their optimizer steps, ascending; values may be NaN or infinite."""

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
        """Append a value. If the step exists already, remove that value and all later ones first."""
        while self.steps and self.steps[-1] >= step:
            self.steps.pop()
            self.values.pop()
        self.steps.append(step)
        self.values.append(value)


class Rows:
    """A table with a row per logged optimizer step and a column per key of the log (or of `keys`).

    A list becomes one column per entry: `routing/layer_03/load/expert_00` and so on. Iteration yields one
    dictionary per step, such as `{"step": 10, "train/loss": 2.5}`, without missing values.
    """

    def __init__(self, lines: Iterable[Row] = (), keys: Collection[str] | None = None) -> None:
        self.columns: dict[str, Series] = {}
        """Key -> series, in the order of the log."""
        for line in lines:
            cells = line.values
            if keys is not None:
                cells = {key: cells[key] for key in keys if key in cells}
            for key, value in flat(cells).items():
                if value is not None:
                    self.columns.setdefault(key, Series()).put(line.step, value)

    def __repr__(self) -> str:
        return f"Rows({len(self)} rows, {len(self.columns)} columns)"

    def column(self, key: str) -> Series:
        """Return the values of a key; an empty series if no row has the key."""
        return self.columns.get(key, Series())

    @property
    def steps(self) -> list[int]:
        """Optimizer steps of the rows, ascending."""
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
        """Return a DataFrame whose index is the step; missing values are NaN. ImportError without pandas."""
        import pandas

        columns = {key: pandas.Series(s.values, index=s.steps) for key, s in self.columns.items()}
        return pandas.DataFrame(columns).rename_axis(STEP_KEY)


def flat(values: Mapping[str, Cell]) -> dict[str, float | None]:
    """Flatten `{"load": [0.25, 0.75]}` to `{"load/expert_00": 0.25, "load/expert_01": 0.75}`."""
    cells: dict[str, float | None] = {}
    for key, value in values.items():
        if isinstance(value, list):
            cells |= {f"{key}/expert_{e:02d}": share for e, share in enumerate(value)}
        else:
            cells[key] = value
    return cells
