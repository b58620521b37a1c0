"""Tables of cases as parameters, of which the default suite runs a few; one sentence for one mistake."""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest

from moe_ffn import ConfigError


def cases(
    table: Mapping[str, Any] | Iterable[tuple[str, Any]], quick: Collection[str] = ()
) -> list[Any]:
    """The rows of a table, each under its name; a tuple is several parameters.

    Args:
        quick: what the default suite runs, by name; the rest is slow.
    """
    rows: list[Any] = list(table.items() if isinstance(table, Mapping) else table)
    assert set(quick) <= {name for name, _ in rows}, "no such case"
    return [
        pytest.param(
            *(row if isinstance(row, tuple) else (row,)),
            id=name,
            marks=() if name in quick else pytest.mark.slow,
        )
        for name, row in rows
    ]


ROOT = Path(__file__).parents[2]


CUSTOM = ("docs/tutorials/custom_ffn.md", "docs/howto/custom_experts.md")


def python_with(text: str, *files: str) -> str:
    """The block of Python in documents that holds `text`, as only one does."""
    page = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files or CUSTOM)
    found = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    (block,) = (code for code in found if text in code)
    return block


def rejects(call: Callable[[], Any], message: str, error: type[Exception] = ConfigError) -> None:
    with pytest.raises(error, match=f"^{re.escape(message)}") as caught:
        call()
    assert type(caught.value) is error
    assert "\n" not in str(caught.value)


def answers(table: str) -> list[Any]:
    """Options as a user types them and the sentence indented below, as two parameters."""
    rows = re.findall(r"^(\S.*)\n((?: .*\n?)+)", table, re.MULTILINE)
    return [
        pytest.param(options, " ".join(answer.split()), id=options[:60]) for options, answer in rows
    ]
