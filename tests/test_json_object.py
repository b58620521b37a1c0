"""JSON objects from files that may be damaged: everything else is None, and raises nothing."""

from __future__ import annotations

from pathlib import Path

import pytest

from moe_ffn.files import parse_object, read_object

DEEP = "[" * 100_000


def test_an_object_is_read_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": [1, 2.5, null]}')

    assert read_object(tmp_path / "a.json") == {"a": [1, 2.5, None]}
    assert parse_object("{}") == {}


@pytest.mark.parametrize(
    "text", ["", "null", "[]", "3", '{"a": 1', f'{{"a": {"9" * 5_000}}}', DEEP]
)
def test_anything_else_is_none(text: str) -> None:
    assert parse_object(text) is None


def test_a_file_that_cannot_be_read_is_none(tmp_path: Path) -> None:
    (tmp_path / "bytes.json").write_bytes(b'{"a": "\xff"}')

    assert read_object(tmp_path / "bytes.json") is None
    assert read_object(tmp_path / "missing.json") is None
    assert read_object(tmp_path) is None
