"""What becomes of a file by accident."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path

Damage = Callable[[Path], object]


def holding(content: bytes) -> Damage:
    """Something else in its place."""
    return lambda path: path.write_bytes(content)


def cut(parts: float) -> Damage:
    """Only so much of it is left, and never all."""

    def damage(path: Path) -> None:
        size = path.stat().st_size
        os.truncate(path, min(int(size * parts), size - 1))

    return damage


def garbage(path: Path) -> None:
    """As much as was there."""
    path.write_bytes(random.Random(0).randbytes(path.stat().st_size))
