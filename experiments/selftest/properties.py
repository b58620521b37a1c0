"""What holds of every MoE layer, tried on thousands that nobody chose."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterable

from experiments.selftest.case import Case, Chapter
from experiments.selftest.scene import REPOSITORY

FILES = ("tests/ffn/test_moe_properties.py", "tests/ffn/test_moe_derivatives.py")
SECONDS_AT_MOST = 1800
_EXAMPLES = re.compile(r"(\d+) passing")
"""In hypothesis's statistics; pytest's own summary has `passed`."""
_PASSED = re.compile(r"(\d+) passed")


def cases() -> Iterable[Case]:
    """Every test of the files, none of them short: the default tests try each on fewer layers."""
    for file in FILES:
        tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef) and node.name.startswith("test_"):
                test, name = f"{file}::{node.name}", node.name.removeprefix("test_")
                yield Case(name.replace("_", " "), lambda _, test=test: _try(test))


CHAPTER = Chapter(
    "properties",
    "Whatever the router, experts, capacity, backend, precision and batch: a layer keeps what it promises.",
    cases,
)


def _try(test: str) -> str:
    """A test on many examples, the same every time; how many there were."""
    ended = subprocess.run(
        [
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            *("-m", "slow or not slow", "--hypothesis-profile", "many"),
            *("--hypothesis-show-statistics", test),
        ],
        cwd=REPOSITORY,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=SECONDS_AT_MOST,
        check=False,
    )
    assert ended.returncode == 0, f"{test} fails: {ended.stdout[-1500:]}"
    numbers = _EXAMPLES.findall(ended.stdout) or _PASSED.findall(ended.stdout)
    assert numbers, f"no count in: {ended.stdout[-500:]}"
    return f"{sum(map(int, numbers))} layers"
