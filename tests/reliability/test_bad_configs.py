"""A config that is wrong in any way gets exit code 2, within a second of its being read, and up to six
lines that name the key, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from moe_ffn.config.base import json_schema
from moe_ffn.config.option_tree import merge
from moe_ffn.runs.config import TrainConfig
from tests.helpers.tiny_runs import run_here

Wrong = tuple[bytes, str]
"""Config files that must be rejected, and the dotted key or file that the answer must name."""


def check_rejected(folder: Path, content: bytes, named: str) -> None:
    """AssertionError where `experiments.train` does not answer it as it answers a mistake."""
    path = folder / "mine.yaml"
    path.write_bytes(content)
    accepted = AssertionError("was accepted")
    with (
        contextlib.chdir(folder),
        patch("moe_ffn.runs.train.run.read_initial_weights", side_effect=accepted),
    ):
        start = time.process_time()  # only of the answer: all that it needs is imported by now
        done = run_here("--config", "mine.yaml")
        seconds = time.process_time() - start
    shown = f"exit code {done.code}, {done.stderr[:400]!r}"
    lines = done.own_lines
    assert (done.code, done.stdout) == (2, ""), shown
    assert 1 <= len(lines) <= 6, f"{len(lines)} lines: {shown}"
    assert all(line.startswith("error: ") and line.isprintable() for line in lines), shown
    assert max(map(len, lines)) < 500, f"a line of {max(map(len, lines))} characters: {shown}"
    assert any(names(line.removeprefix("error: "), named) for line in lines), f"no {named}: {shown}"
    assert seconds < 1, f"{seconds:.1f} s: {shown}"
    assert list(folder.iterdir()) == [path], f"something was written: {shown}"


def names(line: str, named: str) -> bool:
    """Return True for a line about `model.ffn` or a key below it, or about `model` that says `ffn`."""
    where, _, sentence = line.partition(": ")
    above, _, name = named.rpartition(".")
    if where == named or where.startswith(f"{named}."):
        return True
    is_above = f"{above}.".startswith(f"{where}.") or where == f"{above}.type"
    return is_above and name in sentence


# -- every option


def dump(options: dict[str, Any]) -> bytes:
    return yaml.safe_dump(options, sort_keys=False).encode()


SCHEMA = json_schema(TrainConfig)
VALUES = [
    *(
        ("string", "no such choice"),
        ("string", ""),
        ("string", "3"),
        ("integer", 3),
        ("number", 1.5),
    ),
    *(
        ("boolean", True),
        ("boolean", False),
        ("array", ["x"]),
        ("object", {"a": 1}),
        ("null", None),
    ),
    *(("no JSON", float(number)) for number in ("nan", "inf", "-inf")),
]
"""Values with their types in the schema."""
BOUNDS = {"minimum": -1, "exclusiveMinimum": 0, "maximum": 1, "exclusiveMaximum": 0}
"""Bound in the schema -> steps from it to the nearest value outside."""


def kinds_of(option: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the alternatives that the schema has for an option."""
    if "$ref" in option:
        option = SCHEMA["$defs"][option["$ref"].rpartition("/")[2]]
    return (
        [kind for part in option["anyOf"] for kind in kinds_of(part)]
        if "anyOf" in option
        else [option]
    )


def options_below(
    section: dict[str, Any],
    path: tuple[str, ...] = (),
    above: dict[str, Any] | None = None,
    seen: set[str] | None = None,
) -> Iterator[tuple[tuple[str, ...], dict[str, Any], dict[str, Any]]]:
    """Yield the path and schema of each option, and the options without which it is not there.

    Each member of a family is entered at its first place only.
    """
    seen = {"MatchConfig"} if seen is None else seen  # tests/ffn/test_match.py has its mistakes
    options = section["properties"]
    for name, option in options.items():
        if name == "type":
            continue
        here, needed = (*path, name), above or {}
        for other in {*section.get("required", ())} - {name, "type"}:
            values: dict[Any, Any] = {"integer": 1, "array": ["x"]}
            value = values.get(kinds_of(options[other])[0].get("type"), "x")
            needed = merge(needed, nested((*path, other), value))
        yield here, option, needed
        for kind in kinds_of(option):
            if "properties" in kind and "title" in kind and kind["title"] not in seen:
                seen.add(kind["title"])
                tag = kind["properties"].get("type", {})
                names = tag.get("enum", [tag["const"]] if "const" in tag else [])
                chosen = nested((*here, "type"), names[0]) if names else {}
                yield from options_below(kind, here, merge(needed, chosen), seen)


def nested(path: tuple[str, ...], value: Any) -> dict[str, Any]:
    for key in reversed(path):
        value = {key: value}
    return value


def wrong_for(option: dict[str, Any]) -> Iterator[Any]:
    """Yield values of other types, and values out of range."""
    kinds = kinds_of(option)
    types = {kind.get("type") for kind in kinds}
    types |= {"integer"} if "number" in types else set()
    yield from (value for kind, value in VALUES if kind not in types)
    texts = [kind for kind in kinds if kind.get("type") == "string"]
    if texts and all({"enum", "const", "pattern"} & kind.keys() for kind in texts):
        yield "no such choice"
    if "array" in types:
        yield from ([[]], [{"a": 1}])
    if any("type" in kind.get("properties", ()) for kind in kinds):
        yield from ({"type": None}, {"type": 3}, {"type": ["moe"]})
    for kind in kinds:
        step = 1 if kind.get("type") == "integer" else 0.001
        yield from (kind[bound] + steps * step for bound, steps in BOUNDS.items() if bound in kind)
        yield from (
            empty for key, empty in {"minLength": "", "minItems": []}.items() if key in kind
        )


def wrong_values() -> Iterator[Wrong]:
    for path, option, needed in options_below(SCHEMA):
        for value in wrong_for(option):
            yield dump(merge(needed, nested(path, value))), ".".join(path)


def misspelt_options() -> Iterator[Wrong]:
    """A letter too many; and two swapped, with one too many."""
    for (*above, name), _, needed in options_below(SCHEMA):
        for wrong in (f"{name}s", f"{name[1:2]}{name[0]}{name[2:]}_"):
            yield dump(merge(needed, nested((*above, wrong), 1))), ".".join([*above, wrong])


CHANGES = (wrong_values, misspelt_options)


@pytest.mark.parametrize(
    "every", [pytest.param(193, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: changes.__name__)
def test_every_option(
    tmp_path: Path,
    changes: Callable[[], Iterable[Wrong]],
    every: int,
) -> None:
    """Collect all failures and report them together."""
    tried = list(changes())[::every]
    broken = []
    for content, named in tried:
        try:
            check_rejected(tmp_path, content, named)
        except Exception as error:
            broken.append(f"{content[:300]!r}: {type(error).__name__}: {error}")
    assert not broken, f"{len(broken)} of {len(tried)} broken, first {'; '.join(broken[:3])}"
    assert tried
