"""What a person types: the programs of this package, and how to install what they need."""

from __future__ import annotations

import re
import sys
from pathlib import Path

_ROOT = Path(__file__).resolve().parents[1]
"""The clone, or the folder that the package is installed in."""


def command(program: str) -> str:
    """`moe-ffn train`, or `python -m experiments.train` where this process was started so, from a clone."""
    return f"python -m experiments.{program}" if _is_from_clone() else f"moe-ffn {program}"


def as_typed(text: str) -> str:
    """`text` in which every `moe-ffn NAME` is what this user types."""
    return re.sub(r"moe-ffn (\w+)", lambda found: command(found[1]), text)


def process(program: str) -> list[str]:
    """The arguments that start a program in a process of its own, as this one was started."""
    if _is_from_clone():
        return [sys.executable, "-m", f"experiments.{program}"]
    # -P: a folder called moe_ffn in the current one is not taken for this package.
    return [sys.executable, "-P", "-m", "moe_ffn.cli", program]


def install(extra: str) -> str:
    """`pip install 'moe_ffn[train]'`, or `pip install '.[train]'` in a clone."""
    name = "." if (_ROOT / "pyproject.toml").is_file() else "moe_ffn"
    return f"pip install '{name}[{extra}]'"


def _is_from_clone() -> bool:
    started = Path(sys.argv[0])
    return started.is_absolute() and _ROOT / "experiments" in started.resolve().parents
