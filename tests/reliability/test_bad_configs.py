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
from tests.helpers.cases import cases
from tests.helpers.config_fields import fields_of, nested
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


# -- files that are wrong as a whole

FILE = "--config mine.yaml"
GOOD = (REPOSITORY / "configs/moe.yaml").read_bytes()


FILES: dict[str, Wrong] = {
    name: (content, FILE)
    for name, content in {
        "a number": b"3",
        "a byte that is no UTF-8, in the middle": GOOD[:200] + b"\xff" + GOOD[200:],
        "a good file as UTF-16": GOOD.decode().encode("utf-16"),
        "a NUL at its end": GOOD + b"\0",
        "a list without end": GOOD + b"x: [1, 2\n",
        "a tab": GOOD + b"\tx: 1\n",
        "an alias of nobody": GOOD + b"x: *nobody\n",
        "a Python name": b"seed: !!python/name:os.system",
        "a mapping as a key": b"? {a: b}\n: 3\n",
        "10 MB": b"# a comment\n" * 900_000,
        "a quotation without end": b'seed: "1\n',
    }.items()
}

# -- keys and values that are wrong

SIZES = ("model.num_layers", "model.d_model", "data.batch_size")
KEYS: dict[str, Wrong] = {
    "an invisible space in a key": ("se\u200bed: 1\n".encode(), "se\\u200bed"),
    "a dotted key": (b"model.ffn.type: dense\n", "model.ffn.type"),
    "a type of null": (b"model: {ffn: {type: null}}\n", "model.ffn.type"),
    "layers as a list": (b"model: {ffn_at: [dense]}\n", "model.ffn_at"),
    "a slice of no layer": (b"model: {ffn_at: {'1:1': dense}}\n", "model.ffn_at"),
    "a name of a dot": (b"run: {name: .}\n", "run.name"),
    "a line break in a type": (b'model: {ffn: "a\\nb"}', "model.ffn.type"),
    "colours": (b'seed: "\\e[31m"', "seed"),
    "a long key": (b"? %s\n: 1" % (b"k" * 9_000), f"{'k' * 28}...{'k' * 28}"),
    "fifty keys": (b"".join(b"k%d: 1\n" % number for number in range(50)), "k0"),
    "no class": (b"model: {ffn: 'os:'}", "model.ffn.type"),
    "a file that is not there": (b"model: {ffn: 'no.py:b'}", "model.ffn.type"),
    "a function": (b"model: {ffn: 'os:system'}", "model.ffn.type"),
    "YAML 1.1's octal": (b"seed: 010", "seed"),
    "a time": (b"seed: 1:30", "seed"),
    "a float for an int": (b"seed: 1e3", "seed"),
    "too large for a float": (b"optimizer: {learning_rate: 1e999}", "optimizer.learning_rate"),
    "a layer that is no layer": (b"model: {ffn_at: {null: dense}}", "model.ffn_at"),
    "more experts than fit": (b"model: {ffn: {num_experts: 1000000000}}", "model"),
    **{
        f"{key} {size}": (json.dumps(nested(tuple(key.split(".")), size)).encode(), key)
        for key in SIZES
        for size in (10**9, 2**63)
    },
}  # fmt: skip


@pytest.mark.parametrize(("content", "named"), [*cases(FILES, quick=6), *cases(KEYS, quick=8)])
def test_a_config(tmp_path: Path, content: bytes, named: str) -> None:
    check_rejected(tmp_path, content, named)


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
            yield twice.replace('"HERE"', f"{once}, {json.dumps(name)}: {once}").encode(), FILE


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


# -- what looks odd and is right

RIGHT: dict[str, tuple[bytes, dict[str, Any]]] = {
    "empty": (b"", {}),
    "null": (b"null", {}),
    "a comment": (b"# nothing\n", {}),
    "a byte order mark": (b"\xef\xbb\xbfseed: 1", {"seed": 1}),
    "old line ends": (b"seed: 1\r\nsample: {num_tokens: 3}\r\n", {"sample.num_tokens": 3}),
    "1e-3": (b"optimizer: {learning_rate: 1e-3}", {"optimizer.learning_rate": 0.001}),
    "1E-3": (b"optimizer: {learning_rate: 1E-3}", {"optimizer.learning_rate": 0.001}),
    "+1e-3": (b"optimizer: {learning_rate: +1e-3}", {"optimizer.learning_rate": 0.001}),
    ".5": (b"optimizer: {learning_rate: .5}", {"optimizer.learning_rate": 0.5}),
    "5.": (b"optimizer: {learning_rate: 5.}", {"optimizer.learning_rate": 5.0}),
    "1 for 1.0": (b"optimizer: {learning_rate: 1}", {"optimizer.learning_rate": 1.0}),
    "yes": (b"model: {tie_embeddings: yes}", {"model.tie_embeddings": True}),
    "off": (b"model: {tie_embeddings: off}", {"model.tie_embeddings": False}),
    "~": (b"sample: {top_k: ~}", {"sample.top_k": None}),
    "a layer by its number": (b"model: {ffn_at: {0: dense}}", {"model.ffn_at.0.type": "dense"}),
    "an anchor": (b"model: {d_model: &d 64, ffn: {type: dense, d_ff: *d}}", {"model.ffn.d_ff": 64}),
    "a merge": (
        b"model:\n  ffn_at:\n    0: &f {type: dense, d_ff: 8}\n    1: {<<: *f, d_ff: 9}\n",
        {"model.ffn_at.0.d_ff": 8, "model.ffn_at.1.d_ff": 9, "model.ffn_at.1.type": "dense"},
    ),
    "JSON": (b'{"seed": 3, "run": {"name": null}}', {"seed": 3}),
    "a text of digits": (b"run: {name: '12'}", {"run.name": "12"}),
}  # fmt: skip
"""Content of a config file, and the values that it sets."""


@pytest.mark.parametrize(("content", "expected"), cases(RIGHT, quick=3))
def test_odd_but_valid_config_files_are_accepted(
    tmp_path: Path, content: bytes, expected: dict[str, Any]
) -> None:
    (tmp_path / "mine.yaml").write_bytes(content)

    done = run_here("--config", str(tmp_path / "mine.yaml"), "--print-config")

    assert done.code == 0, done.stderr
    for path, value in expected.items():
        found: Any = yaml.safe_load(done.stdout)
        for key in path.split("."):
            found = found[key]
        assert (found, type(found)) == (value, type(value)), path
