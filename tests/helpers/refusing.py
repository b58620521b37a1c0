"""One sentence for one mistake."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from moe_ffn import ConfigError


def refuses(call: Callable[[], Any], message: str, error: type[Exception] = ConfigError) -> None:
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
