"""Logs of metrics, samples and alarms: one JSON object per line, with its optimizer step."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_ffn.config.files import (
    WriteFailures,
    open_file,
    parse_object,
    read_bytes,
    sync_folder,
    write_atomically,
)

STEP_KEY = "step"
"""Key of the optimizer step in every line."""
VALIDATION_LOSS = "validation/loss"
"""Key that only validation rows have."""
TRAIN_SECONDS = "train/seconds"
"""Key of the seconds of training since the start of the run, without validations."""
STEP_SECONDS = "train/step_seconds"
"""Key of the median seconds of an optimizer step in a row; one slow step does not change the median."""

Cell = float | list[float | None] | None
"""A value of a row; a number may be NaN or infinite."""


class Line(BaseModel):
    """One object of a log."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    step: Annotated[int, Field(ge=0, le=2**53)]
    """Optimizer step; floats represent integers exactly only up to this limit."""


class Row(Line):
    """A row of metrics: numbers, and lists with a number for each expert."""

    __pydantic_extra__: dict[str, Cell]  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def values(self) -> Mapping[str, Cell]:
        return self.__pydantic_extra__

    @property
    def is_validation(self) -> bool:
        return VALIDATION_LOSS in self.values


class Sample(Line):
    """A text that the model generated after the prompt at an optimizer step."""

    prompt: str = ""
    text: str = ""


class Alarm(Line):
    """A problem in one layer or in the whole model."""

    kind: str = ""
    """An `AlarmKind`."""
    layer: str | None = None
    """Name of the layer, as in the keys of metrics; None for the whole model."""
    message: str = ""
    """The problem with its measured value and limit, without the layer."""
    advice: str = ""
    """Options to try, with their current values."""

    def __str__(self) -> str:
        place = "" if self.layer is None else f"{self.layer}: "
        return f"step {self.step}: {place}{self.message}; {self.advice}"


AnyLine = TypeVar("AnyLine", bound=Line)


class JsonLines:
    """Appends lines to a log; lines that cannot be written are kept and retried at the next call."""

    def __init__(self, path: Path, *, is_synced: bool = True) -> None:
        self.path = path
        self._is_synced = is_synced
        self._pending: list[bytes] = []
        self._end = -1  # size in bytes of the complete lines in the file; -1 before the first write
        self._failures = WriteFailures(path)

    @property
    def is_complete(self) -> bool:
        """True if every line is written."""
        return not self._pending

    def add(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Write each mapping as a line, synced to the disk if `is_synced`."""
        self._pending.extend(f"{json.dumps(value)}\n".encode() for value in values)
        with self._failures.expected():
            self._write_pending()

    def sync(self) -> None:
        """Sync every line to the disk, or report the failure."""
        with self._failures.expected():
            self._write_pending()
            if self.path.exists():
                with open_file(self.path) as file:
                    os.fsync(file.fileno())

    def _write_pending(self) -> None:
        if not self._pending:
            return
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self.path.is_symlink() and self.path.exists():
            # Replace the link with a copy, since its target must not change.
            write_atomically(self.path, read_bytes(self.path))
        with open_file(self.path, "ab") as file:
            descriptor, size = file.fileno(), file.tell()
            is_new = not 0 <= self._end <= size
            if is_new:
                self._end = sum(map(len, _complete_lines(self.path)))
            if size > self._end:  # an incomplete line from a killed process or a failed write
                os.truncate(descriptor, self._end)
            try:
                rest = memoryview(b"".join(self._pending))
                while rest:  # unbuffered, so that closing the file does not retry a failed write
                    rest = rest[os.write(descriptor, rest) :]
                if self._is_synced:
                    os.fsync(descriptor)
            except OSError:
                os.truncate(descriptor, self._end)
                raise
            self._end += sum(map(len, self._pending))
        self._pending.clear()
        if is_new:
            sync_folder(self.path.parent)


def read_lines(path: Path, kind: type[AnyLine]) -> Iterator[AnyLine]:
    """Yield the lines of a log; none if there is no file.

    An incomplete last line is skipped, since its writer died or has not finished. Damaged lines are skipped
    too; see `num_damaged`.
    """
    return (value for _, value in _read(path, kind) if value is not None)


def num_damaged(path: Path, kind: type[Line]) -> int:
    """Return the number of complete lines of a log that are not of this kind."""
    return sum(value is None for _, value in _read(path, kind))


def cut_lines(path: Path, kind: type[AnyLine], is_kept: Callable[[AnyLine], bool]) -> list[AnyLine]:
    """Remove the lines that a resumed run will write again, and damaged lines; return the others."""
    kept = [(line, v) for line, v in _read(path, kind) if v is not None and is_kept(v)]
    if kept:
        write_atomically(path, b"".join(line for line, _ in kept))
    else:
        path.unlink(missing_ok=True)
    return [value for _, value in kept]


def _read(path: Path, kind: type[AnyLine]) -> Iterator[tuple[bytes, AnyLine | None]]:
    for line in _complete_lines(path):
        try:
            yield line, kind.model_validate(parse_object(line))
        except ValidationError:
            yield line, None


def _complete_lines(path: Path) -> Iterator[bytes]:
    try:
        file = open_file(path)
    except FileNotFoundError:
        return
    with file:
        yield from (line for line in file if line.endswith(b"\n"))
