"""A config that is wrong in any way gets exit code 2, within a second of its being read, and up to six
lines that name the key, and leaves nothing behind.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import yaml

from moe_ffn.runs.config import TrainConfig
from tests.helpers.config_fields import fields_of
from tests.helpers.tiny_runs import REPOSITORY, run_here

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


# -- every option, and every key of every shipped file


def dump(options: dict[str, Any]) -> bytes:
    return yaml.safe_dump(options, sort_keys=False).encode()


def wrong_values() -> Iterator[Wrong]:
    for field in fields_of(TrainConfig):
        for value in field.wrong_values():
            yield dump(field.given(value)), ".".join(field.path)


def misspelt_options() -> Iterator[Wrong]:
    """A letter too many; and two swapped, with one too many."""
    for field in fields_of(TrainConfig):
        *above, name = field.path
        for wrong in (f"{name}s", f"{name[1:2]}{name[0]}{name[2:]}_"):
            yield dump(field.given(1, wrong)), ".".join([*above, wrong])


def changed_files() -> Iterator[Wrong]:
    """Mistakes at every key of every shipped file: misspelt, duplicated, or a value of another type."""
    files = {*(REPOSITORY / "configs").rglob("*.yaml")}
    for file in sorted(files - {*(REPOSITORY / "configs/studies").iterdir()}):
        options = yaml.safe_load(file.read_text(encoding="utf-8"))
        for path, value in keys_of(options):
            *above, name = path
            dotted = ".".join(path)
            if name != "0":  # a layer of ffn_at
                wrong = f"{name}s"
                yield dump(replaced(options, path, wrong, value)), ".".join([*above, wrong])
            other = [1, [2]] if isinstance(value, dict) else {"no": {"such": "thing"}}
            yield dump(replaced(options, path, name, other)), dotted
            once = json.dumps(value)
            twice = json.dumps(replaced(options, path, name, "HERE"))
            yield (
                twice.replace('"HERE"', f"{once}, {json.dumps(name)}: {once}").encode(),
                "--config mine.yaml",
            )


def keys_of(options: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[Any, Any]]:
    for key, value in options.items():
        yield (*path, key), value
        if isinstance(value, dict):
            yield from keys_of(value, (*path, key))


def replaced(options: dict[str, Any], path: tuple[str, ...], key: str, value: Any) -> Any:
    """A copy in which the last key of `path` is `key` and holds `value`."""
    first, *rest = path
    if rest:
        return options | {first: replaced(options[first], tuple(rest), key, value)}
    return {
        (key if name == first else name): (value if name == first else old)
        for name, old in options.items()
    }


CHANGES = (wrong_values, misspelt_options, changed_files)


@pytest.mark.parametrize(
    "every", [pytest.param(193, id="some"), pytest.param(1, id="all", marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("changes", CHANGES, ids=lambda changes: changes.__name__)
def test_every_option_and_every_key(
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
