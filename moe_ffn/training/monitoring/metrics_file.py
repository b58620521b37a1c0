"""`metrics.csv`: one line for every row of metrics, as soon as it is known."""

from __future__ import annotations

import csv
import io
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from moe_ffn.files import open_file, read_text, write_whole
from moe_ffn.training.recovery.outage import Outage, count_taken

STEP = "step"
"""The column of the optimizer step a row was written at, by which a resumed run finds its place."""

VALIDATION_LOSS = "validation/loss"
"""A column of the rows of validations alone."""


class MetricsFile(Logger):
    """Appends to a CSV file, which is written anew where a row has columns that it lacks.

    What cannot be written is kept and written later; see `Outage`.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.path = path
        self._columns: list[str] = []
        self._size = -1  # of the file, where it holds whole lines and these columns
        self._pending: list[dict[str, Any]] = []
        self._outage = Outage(path)

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    @property
    def is_complete(self) -> bool:
        """Whether the disk took every row."""
        return not self._pending

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: a run's `config.yaml` has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a row. A list is a column for each entry, `load/expert_00` and on."""
        self._pending.append({STEP: step, **columns(metrics)})
        with self._outage.expected():
            self._write_pending()

    @rank_zero_only
    def save(self) -> None:
        """Return when every row is on the disk, or was said not to be."""
        with self._outage.expected():
            self._write_pending()
            if self.path.exists():
                with open_file(self.path) as file:
                    os.fsync(file.fileno())

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()

    def _write_pending(self) -> None:
        if not self._pending:
            return
        fresh = [name for row in self._pending for name in row if name not in self._columns]
        if fresh or not self._is_as_it_was_left():
            self._write_anew()
        else:
            self._append()
        self._pending.clear()

    def _is_as_it_was_left(self) -> bool:
        """Whether it can be appended to; one with a second name, as `cp -l` makes, is not ours alone."""
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return False
        return found.st_size == self._size and found.st_nlink == 1

    def _write_anew(self) -> None:
        # A disk that failed after it took some of them has those already.
        kept = read_rows(self.path)
        num_taken = count_taken(kept, _rows(*_split(_table(self._pending)[1])))
        names, text = _table([*kept, *self._pending[num_taken:]])
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(self.path, text)
        self._columns, self._size = names, len(text.encode())

    def _append(self) -> None:
        lines = _lines(self._pending, self._columns).encode()
        try:
            with open_file(self.path, "ab") as file:
                file.write(lines)
        except OSError:
            with open_file(self.path, "r+b") as file:
                file.truncate(self._size)  # half a line is no row
            raise
        self._size += len(lines)


def columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """`{"load": [0.25, 0.75]}` as `{"load/expert_00": 0.25, "load/expert_01": 0.75}`."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, list):
            flat |= {f"{key}/expert_{e:02d}": share for e, share in enumerate(value)}
        else:
            flat[key] = value
    return flat


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a file, without empty cells; none where there is no file.

    A last line without its end is left out: its writer died. So is a line that is no row; see
    `num_damaged`.
    """
    return _rows(*_read(path))


def num_damaged(path: Path) -> int:
    """How many whole lines of a file are no rows of numbers, or stand under a header that is none."""
    names, lines = _read(path)
    has_header = STEP in names or not (names or lines)
    return sum(not _fit(_cells(line), names) for line in lines) + (not has_header)


def cut_rows(path: Path, step: int, validated_step: int) -> None:
    """Remove the rows that a run resumed from optimizer step `step` will write again.

    Args:
        validated_step: of its last validation. That of `step` itself may be still to come.
    """
    rows = [
        row
        for row in read_rows(path)
        if int(row[STEP]) <= (validated_step if VALIDATION_LOSS in row else step)
    ]
    if rows:
        write_whole(path, _table(rows)[1])
    else:
        path.unlink(missing_ok=True)


def _read(path: Path) -> tuple[list[str], list[str]]:
    """The columns, and the whole lines below them."""
    try:
        text = read_text(path, errors="replace")
    except FileNotFoundError:
        return [], []
    return _split(text)


def _split(text: str) -> tuple[list[str], list[str]]:
    header, *lines = text.split("\n")[:-1] or [""]
    return _cells(header) or [header] * bool(header), lines


def _rows(names: Sequence[str], lines: Iterable[str]) -> list[dict[str, str]]:
    rows = [
        dict(zip(names, cells, strict=True)) for cells in map(_cells, lines) if _fit(cells, names)
    ]
    return [{name: cell for name, cell in row.items() if cell} for row in rows]


def _cells(line: str) -> list[str]:
    # Line by line, or a stray quotation mark would make one cell of all the rest.
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error:  # a cell of a hundred thousand characters
        return []


def _fit(cells: Sequence[str], names: Sequence[str]) -> bool:
    """Whether these are numbers, as many as there are columns, and one of them the step."""
    if STEP not in names or len(cells) != len(names):
        return False
    return cells[names.index(STEP)].isdecimal() and all(map(_is_number, filter(None, cells)))


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _table(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], str]:
    """The columns of all rows, and the text of a file of them."""
    names = list(dict.fromkeys(name for row in rows for name in row))
    return names, _lines([dict(zip(names, names, strict=True)), *rows], names)


def _lines(rows: Iterable[Mapping[str, Any]], names: Sequence[str]) -> str:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, names, restval="", lineterminator="\n")
    writer.writerows(rows)
    return text.getvalue()
