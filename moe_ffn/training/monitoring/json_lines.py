"""Logs of one JSON object a line, each with the optimizer step it belongs to: metrics, samples, alarms."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from moe_ffn.files import open_file, parse_object, write_whole
from moe_ffn.training.recovery.outage import Outage, count_taken

STEP = "step"
VALIDATION_LOSS = "validation/loss"
"""A key of the rows of validations alone."""


Cell = float | list[float | None] | None
"""What a row has under a key; a number may be NaN or infinite."""


class Line(BaseModel):
    """One object of a log."""

    model_config = ConfigDict(strict=True, frozen=True, extra="allow")

    step: Annotated[int, Field(ge=0, le=2**53)]
    """The optimizer step; a float does not tell a larger one from the next."""


class Row(Line):
    """A row of metrics: beside its step numbers, and lists with a number for each expert."""

    __pydantic_extra__: dict[str, Cell]  # pyright: ignore[reportIncompatibleVariableOverride]

    @property
    def values(self) -> Mapping[str, Cell]:
        return self.__pydantic_extra__

    @property
    def is_of_validation(self) -> bool:
        return VALIDATION_LOSS in self.values


class Sample(Line):
    """What the model wrote at an optimizer step, after the prompt."""

    prompt: str = ""
    text: str = ""


AnyLine = TypeVar("AnyLine", bound=Line)


class JsonLines:
    """Appends to a log, which appears with its first line; what cannot be written waits, see `Outage`."""

    def __init__(self, path: Path, *, is_synced: bool = True) -> None:
        """
        Args:
            is_synced: every line is on the disk when `add` returns; otherwise when `sync` does.
        """
        self.path = path
        self._is_synced = is_synced
        self._pending: list[bytes] = []
        self._num_tried = 0  # of those, how many a write that failed may have left in the file
        self._size = -1  # of the file as it was left; -1 before the first line
        self._outage = Outage(path)

    @property
    def is_complete(self) -> bool:
        """Whether the disk took every line."""
        return not self._pending

    def add(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Write each as a line."""
        self._pending.extend(f"{json.dumps(value)}\n".encode() for value in values)
        with self._outage.expected():
            self._write_pending()

    def sync(self) -> None:
        """Return when every line is on the disk, or was said not to be."""
        with self._outage.expected():
            self._write_pending()
            if self.path.exists():
                with open_file(self.path) as file:
                    os.fsync(file.fileno())

    def _write_pending(self) -> None:
        if not self._pending:
            return
        if self._is_as_it_was_left():
            self._append()
        else:
            self._write_anew()
        self._pending.clear()
        self._num_tried = 0

    def _is_as_it_was_left(self) -> bool:
        """Whether it can be appended to; one with a second name, as `cp -l` makes, is not ours alone."""
        try:
            found = self.path.lstat()
        except FileNotFoundError:
            return False
        return found.st_size == self._size and found.st_nlink == 1

    def _append(self) -> None:
        lines = b"".join(self._pending)
        with open_file(self.path, "ab") as file:
            self._num_tried = len(self._pending)
            try:
                _write(file.fileno(), lines)
                if self._is_synced:
                    os.fsync(file.fileno())
            except OSError:
                os.truncate(file.fileno(), self._size)  # half a line is none
                self._num_tried = 0
                raise
        self._size += len(lines)

    def _write_anew(self) -> None:
        """With the whole lines that are there: at the first one of a process, and after a failure."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        kept = list(_whole_lines(self.path))
        num_taken = count_taken(kept, self._pending[: self._num_tried])
        content = b"".join([*kept, *self._pending[num_taken:]])
        self._num_tried = len(self._pending)
        write_whole(self.path, content)
        self._size = len(content)


def read_lines(path: Path, kind: type[AnyLine]) -> Iterator[AnyLine]:
    """The lines of a log, one after the other as they are read; none where there is no file.

    A last line without its end is left out, since its writer died or is about to end it. So is a line that
    is no such object; see `num_damaged`.
    """
    return (value for _, value in _read(path, kind) if value is not None)


def num_damaged(path: Path, kind: type[Line]) -> int:
    """How many whole lines of a log are no such objects."""
    return sum(value is None for _, value in _read(path, kind))


def cut_lines(path: Path, kind: type[AnyLine], is_kept: Callable[[AnyLine], bool]) -> None:
    """Remove the lines that a resumed run will write again, and those that nobody can read."""
    kept = [line for line, value in _read(path, kind) if value is not None and is_kept(value)]
    if kept:
        write_whole(path, b"".join(kept))
    else:
        path.unlink(missing_ok=True)


def _read(path: Path, kind: type[AnyLine]) -> Iterator[tuple[bytes, AnyLine | None]]:
    for line in _whole_lines(path):
        try:
            yield line, kind.model_validate(parse_object(line))
        except ValidationError:
            yield line, None


def _whole_lines(path: Path) -> Iterator[bytes]:
    try:
        file = open_file(path)
    except FileNotFoundError:
        return
    with file:
        yield from (line for line in file if line.endswith(b"\n"))


def _write(descriptor: int, content: bytes) -> None:
    """Unbuffered: what a failing disk did not take is not to be written once more when the file is closed."""
    rest = memoryview(content)
    while rest:
        rest = rest[os.write(descriptor, rest) :]
