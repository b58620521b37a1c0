"""Files of one JSON object a line, each with the optimizer step it belongs to."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from moe_ffn.files import parse_object, read_text, write_whole
from moe_ffn.training.recovery.outage import Outage, count_taken


class JsonLines:
    """Appends to a file, which appears with the first object; what cannot be written waits."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._pending: list[str] = []
        self._num_tried = 0  # of those, how many a write that failed may have left in the file
        self._outage = Outage(path)

    @property
    def is_complete(self) -> bool:
        """Whether the disk took every line."""
        return not self._pending

    def add(self, values: Iterable[Mapping[str, Any]]) -> None:
        """Write each as a line."""
        self._pending.extend(json.dumps(value) + "\n" for value in values)
        if not self._pending:
            return
        with self._outage.expected():
            # Whole, since these files are short, so that no disk can leave half a line.
            self.path.parent.mkdir(parents=True, exist_ok=True)
            kept = _whole_lines(self.path)
            # A disk that failed after it took some of them has those already.
            num_taken = count_taken(kept, self._pending[: self._num_tried])
            self._num_tried = len(self._pending)
            write_whole(self.path, "".join([*kept, *self._pending[num_taken:]]))
            self._pending.clear()
            self._num_tried = 0


def cut_lines(path: Path, step: int) -> None:
    """Remove what was written after optimizer step `step`, which a resumed run will write again."""
    lines = _whole_lines(path)
    kept = [line for line in lines if (value := _with_step(line)) and value["step"] <= step]
    if kept:
        write_whole(path, "".join(kept))
    else:
        path.unlink(missing_ok=True)


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The objects that have a step; none where there is no file."""
    return [value for line in _whole_lines(path) if (value := _with_step(line)) is not None]


def num_damaged(path: Path) -> int:
    """How many whole lines of a file are no objects with a step."""
    return sum(_with_step(line) is None for line in _whole_lines(path))


def _whole_lines(path: Path) -> list[str]:
    """None where there is no file; without a last line that has no end, whose writer died."""
    try:
        text = read_text(path, errors="replace")
    except FileNotFoundError:
        return []
    return [f"{line}\n" for line in text.split("\n")[:-1]]


def _with_step(line: str) -> dict[str, Any] | None:
    """The object in a line; None where it is none, or has no step."""
    value = parse_object(line)
    return value if value is not None and type(value.get("step")) is int else None
