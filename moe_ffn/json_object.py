"""JSON objects from files that may be damaged, half written, or anybody's."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

from moe_ffn.files import read_text


def read_object(path: Path, *, finite: bool = False) -> dict[str, Any] | None:
    """The JSON object in a file; None where the file cannot be read or holds anything else.

    Args:
        finite: with None in the place of every number that no finite float holds.
    """
    try:
        return parse_object(read_text(path), finite=finite)
    except (OSError, UnicodeDecodeError):
        return None


def parse_object(text: str, *, finite: bool = False) -> dict[str, Any] | None:
    """The JSON object that `text` is, as `read_object` reads it; None where it is anything else."""
    numbers = _FINITE if finite else {}
    try:
        value = json.loads(text, **numbers)
    except (
        ValueError,
        RecursionError,
    ):  # RecursionError: thousands of brackets, one inside the other
        return None
    return value if isinstance(value, dict) else None


def _whole(digits: str) -> int | None:
    return None if _number(digits) is None else int(digits)


def _number(digits: str) -> float | None:
    value = float(digits)
    return value if math.isfinite(value) else None


_FINITE: dict[str, Any] = {
    "parse_constant": lambda _: None,  # NaN, Infinity, -Infinity
    "parse_float": _number,
    "parse_int": _whole,
}
