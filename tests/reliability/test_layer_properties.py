"""Whatever the router, experts, capacity, backend, precision and batch: a layer keeps what it promises, tried
on thousands that nobody chose.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Callable

import pytest

from tests.helpers.tiny_runs import REPOSITORY, finish, start_command

FILES = ("tests/ffn/test_moe_properties.py", "tests/ffn/test_moe_derivatives.py")
"""Each sentence of which the default suite tries on fewer layers."""
MAX_SECONDS = 1800


def properties() -> list[str]:
    found = []
    for file in FILES:
        tree = ast.parse((REPOSITORY / file).read_text(encoding="utf-8"))
        tests = (node.name for node in tree.body if isinstance(node, ast.FunctionDef))
        found += [f"{file}::{name}" for name in tests if name.startswith("test_")]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("test", properties(), ids=lambda test: test.partition("::test_")[2])
def test_a_property(test: str, record_property: Callable[[str, object], None]) -> None:
    """On many examples, the same every time."""
    python = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", test]
    many = [
        "-m",
        "slow or not slow",
        "--hypothesis-profile",
        "many",
        "--hypothesis-show-statistics",
    ]

    ended = finish(start_command([*python, *many]), timeout=MAX_SECONDS)

    assert ended.code == 0, ended.stdout[-1500:]
    # In hypothesis's statistics; pytest's own summary has `passed`.
    numbers = re.findall(r"(\d+) passing", ended.stdout) or re.findall(
        r"(\d+) passed", ended.stdout
    )
    assert numbers, ended.stdout[-500:]
    record_property(
        "measured", f"{sum(map(int, numbers)):,} layers: {test.partition('::test_')[2]}"
    )
