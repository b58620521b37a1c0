"""Config files that are wrong in every way we could think of."""

from __future__ import annotations

import contextlib
import importlib
import json
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn
from unittest.mock import patch

from experiments.selftest import scene
from experiments.selftest.case import Case, Chapter

_SHORT_STEP = 25
"""Of the mutations of options, the short version tries every 25th."""


@dataclass(frozen=True)
class Mutation:
    """A config that must be refused."""

    content: bytes
    named: str
    """What the answer must name: a dotted key, or the file where it is at fault as a whole."""


@dataclass(frozen=True)
class Answer:
    code: int
    stdout: str
    stderr: str
    seconds: float
    """Of the processor: how long it takes where nothing else is running."""


def ask(folder: Path, content: bytes) -> Answer:
    """What `experiments.train` answers in this process; its training is replaced by an error."""
    importlib.import_module("experiments.train")  # whose time is not that of the answer
    (folder / "mine.yaml").write_bytes(content)
    training = ModuleType("moe_ffn.cli.training_run")
    training.__dict__["train"] = _was_accepted
    start = time.process_time()
    with contextlib.chdir(folder), patch.dict(sys.modules, {training.__name__: training}):
        done = scene.run_here("--config", "mine.yaml")
    seconds = time.process_time() - start
    return Answer(done.code, done.stdout, done.stderr, seconds)


def _was_accepted(*_: Any) -> NoReturn:
    raise AssertionError("was accepted")


def check_refused(answer: Answer, mutation: Mutation, folder: Path) -> None:
    """AssertionError where this is not the answer that a mistake gets."""
    shown = f"{mutation.content[:300]!r}: exit code {answer.code}, {answer.stderr[:400]!r}"
    lines = answer.stderr.splitlines()
    assert answer.code == 2, shown
    assert 1 <= len(lines) <= 3, f"{len(lines)} lines: {shown}"
    assert all(line.startswith("error: ") for line in lines), shown
    assert max(map(len, lines)) < 500, f"a line of {max(map(len, lines))} characters: {shown}"
    assert "Traceback" not in answer.stdout + answer.stderr, shown
    assert answer.stdout == "", f"{shown}, on stdout {answer.stdout[:100]!r}"
    assert any(_names(line, mutation.named) for line in lines), f"no {mutation.named}: {shown}"
    assert answer.seconds < 1, f"{answer.seconds:.1f} s: {shown}"
    assert [path.name for path in folder.iterdir()] == ["mine.yaml"], f"something written: {shown}"


def _names(line: str, named: str) -> bool:
    """Whether a line is about `model.ffn`, what is inside of it, or about `model` and says `ffn`."""
    where, _, sentence = line.removeprefix("error: ").partition(": ")
    above, _, name = named.rpartition(".")
    if where == named or where.startswith(f"{named}."):
        return True
    is_above = f"{above}.".startswith(f"{where}.") or where == f"{above}.type"
    return is_above and name in sentence


def refuse_all(folder: Path, mutations: Iterable[Mutation]) -> str:
    """Try them one after the other; all mistakes of the program are told together."""
    count, worst, broken = 0, 0.0, []
    for mutation in mutations:
        count += 1
        try:
            answer = ask(folder, mutation.content)
            check_refused(answer, mutation, folder)
        except AssertionError as error:
            broken.append(str(error) or f"{mutation.content[:300]!r}: was accepted")
        except Exception as error:
            broken.append(f"{mutation.content[:300]!r}: {type(error).__name__}: {error}")
        else:
            worst = max(worst, answer.seconds)
    assert count, "nothing was tried"
    assert not broken, f"{len(broken)} of {count} broken, first {'; '.join(broken[:3])}"
    return f"{count} of {count} refused, {1000 * worst:.0f} ms at most"


# -- mutations of every option


def _nested(path: Iterable[str], value: Any) -> dict[str, Any]:
    for key in reversed(list(path)):
        value = {key: value}
    return value


def _file(options: dict[str, Any]) -> bytes:
    import yaml

    return yaml.safe_dump(options, sort_keys=False).encode()


def _with(field: Any, value: Any, name: str | None = None) -> bytes:
    """A config with `value` at a field, and what the field needs around it."""
    from moe_ffn.config_files import merge

    options: dict[str, Any] = {}
    for path, needed in field.chosen:
        options = merge(options, _nested(path, needed))
    path = field.path if name is None else (*field.path[:-1], name)
    return _file(merge(options, _nested(path, value)))


def _fields() -> list[Any]:
    from experiments.selftest.config_fields import fields_of
    from moe_ffn.runs.config import TrainConfig

    return fields_of(TrainConfig)


def wrong_values() -> Iterator[Mutation]:
    for field in _fields():
        for value in field.wrong_values():
            yield Mutation(_with(field, value), field.dotted)


def wrong_lightning_arguments() -> Iterator[Mutation]:
    """What is passed on to `lightning.Trainer`; that some of it is accepted there is no excuse."""
    from moe_ffn.training.config import LIGHTNING_ARGUMENTS

    for name in LIGHTNING_ARGUMENTS:
        for value in (1.5, {"no": "such"}, [[1]], float("nan")):
            yield Mutation(_file({"trainer": {name: value}}), f"trainer.{name}")
    for name in (
        "benchmark",
        "detect_anomaly",
        "deterministic",
        "inference_mode",
        "sync_batchnorm",
    ):
        for value in ("no", 0, 1):
            yield Mutation(_file({"trainer": {name: value}}), f"trainer.{name}")


def misspelt_keys() -> Iterator[Mutation]:
    """A letter too many; and two swapped, with one too many."""
    for field in _fields():
        name = field.path[-1]
        for wrong in (f"{name}s", f"{name[1:2]}{name[0]}{name[2:]}_"):
            where = ".".join((*field.path[:-1], wrong))
            yield Mutation(_with(field, 1, wrong), where)


# -- mutations of the shipped files


def shipped() -> list[Path]:
    return sorted((scene.REPOSITORY / "configs").rglob("*.yaml"))


def _leaves(options: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    for key, value in options.items():
        yield (*path, key), value
        if isinstance(value, dict):
            yield from _leaves(value, (*path, key))


def _replaced(options: Any, path: tuple[str, ...], key: str, value: Any) -> dict[str, Any]:
    """A copy in which the last key of `path` is `key` and holds `value`."""
    first, *rest = path
    return {
        (key if name == first and not rest else name): (
            old if name != first else value if not rest else _replaced(old, tuple(rest), key, value)
        )
        for name, old in options.items()
    }


def mutated_keys() -> Iterator[Mutation]:
    """Of every key of every shipped file: misspelt, given twice, its value of another kind."""
    import yaml

    for file in shipped():
        options = yaml.safe_load(file.read_text(encoding="utf-8"))
        for path, value in _leaves(options):
            *above, name = path
            dotted = ".".join(path)
            if name != "0":  # a layer of ffn_at
                wrong = f"{name}s"
                yield Mutation(
                    _file(_replaced(options, path, wrong, value)), ".".join([*above, wrong])
                )
            other = [1, [2]] if isinstance(value, dict) else {"no": {"such": "thing"}}
            yield Mutation(_file(_replaced(options, path, name, other)), dotted)
            twice = json.dumps(_replaced(options, path, name, "HERE"))
            same = json.dumps(value)
            doubled = twice.replace('"HERE"', f"{same}, {json.dumps(name)}: {same}")
            yield Mutation(doubled.encode(), "--config mine.yaml")


def damaged_files() -> Iterator[Mutation]:
    """Every shipped file, damaged as a whole."""
    for file in shipped():
        content = file.read_bytes()
        middle = len(content) // 2
        for damaged in (
            content[:middle] + b"\xff" + content[middle:],
            content.decode().encode("utf-16"),
            content + b"\0",
            content + b"x: [1, 2\n",
            content + b"\tx: 1\n",
            content + b"---\nseed: 1\n",
            content + b"x: &a [*a]\n",
            content + b"x: &a\n  y: *a\n",
            content + b"x: *nobody\n",
            content + b"x: !!python/object/apply:os.system ['touch hacked']\n",
            content + b"x: !mine {}\n",
            content + b"x: %s\n" % (b"[" * 1000 + b"]" * 1000),
            content + b"x: " + b"9" * 10_000 + b"\n",
            content + b"# a comment\n" * 900_000,
        ):
            yield Mutation(damaged, "--config mine.yaml")


# -- files that are wrong as a whole


def _laughs(last: bytes) -> bytes:
    """Nine anchors, each of nine times the one before: half a billion values in a few hundred bytes."""
    lines = [b"a: &a [x, x, x, x, x, x, x, x, x]\n"]
    lines += [
        b"%c: &%c [%s]\n" % (n, n, b", ".join([b"*%c" % (n - 1)] * 9)) for n in range(98, 107)
    ]
    return b"".join(lines) + last


WHOLE = {
    "a list": b"- 1\n- 2\n",
    "a word": b"moe",
    "a number": b"3",
    "binary": bytes(range(256)),
    "zeros": bytes(1000),
    "UTF-16": "seed: 1".encode("utf-16"),
    "a Python object": b"!!python/object/apply:os.system ['touch hacked']",
    "a Python name": b"seed: !!python/name:os.system",
    "a Python module": b"? !!python/module:this\n: 1",
    "a set": b"seed: !!set {a, b}",
    "a date by its tag": b"seed: !!timestamp 2026-11-21",
    "bytes": b"seed: !!binary aGk=",
    "a tag that does not fit": b"seed: !!bool maybe",
    "an empty number": b"seed: !!int ''",
    "a list that holds itself": b"&a [*a]",
    "a mapping that holds itself": b"&a\nmodel: *a\n",
    "a block that holds itself": b"model:\n  ffn: &f {type: mixture_of_depths, ffn: *f}\n",
    "a mapping merged into itself": b"model: &a {<<: *a}",
    "a billion laughs": _laughs(b""),
    "a billion laughs, in an option": _laughs(b"seed: *j\n"),
    "a billion laughs, merged": b"a: &a {x: 1}\n"
    + b"".join(
        b"%c: &%c {<<: [%s]}\n" % (n, n, b", ".join([b"*%c" % (n - 1)] * 9)) for n in range(98, 107)
    ),
    "deep lists": b"[" * 99_000,
    "deep mappings": b"{a: " * 24_000,
    "deep blocks": b"\n".join(b" " * level + b"a:" for level in range(400)),
    "many values": b"seed: [" + b"1, " * 33_000 + b"1]",
    "many keys": b"".join(b"%d: 1\n" % number for number in range(11_000)),
    "one long word": b"x" * 99_999,
    "a list as a key": b"? [1, 2]\n: 3\n",
    "a mapping as a key": b"? {a: b}\n: 3\n",
    "10 MB": b"# a comment\n" * 900_000,
    "10 MB in one line": b"seed: " + b"1" * 10_000_000,
    "100 kB of quotes": b'seed: "' + b"\\x41" * 25_000 + b'"',
}
"""By name; each is refused with the name of the file, those apart that `NAMED` gives a key."""

NAMED = {
    "seed: 1000 values of another kind": (b"seed: [" + b"1, " * 1000 + b"1]", "seed"),
    "a number as a key": (b"1: 2", "1"),
    "a number as a key, deep": (b"model: {ffn: {1: 2}}", "model.ffn.1"),
    "true as a key": (b"true: 1", "True"),
    "null as a key": (b"model: {null: 1}", "model.None"),
    "an empty key": (b"'': 1", "''"),
    "a line break in a key": (b'"a\\nb": 1', "a\\nb"),
    "a line break in a type": (b'model: {ffn: "a\\nb"}', "model.ffn.type"),
    "a line break in an import path": (b'model: {ffn: "a\\nb:C"}', "model.ffn.type"),
    "colours": (b'seed: "\\e[31m"', "seed"),
    "a long key": (b"? %s\n: 1" % (b"k" * 9_000), "k" * 57 + "..."),
    "a long type": (b"model: {ffn: %s}" % (b"t" * 9_000), "model.ffn.type"),
    "a long import path": (b"model: {ffn: '%s:b'}" % (b"t" * 9_000), "model.ffn.type"),
    "fifty keys": (b"".join(b"k%d: 1\n" % number for number in range(50)), "k0"),
    "no class": (b"model: {ffn: 'os:'}", "model.ffn.type"),
    "no module": (b"model: {ffn: ':b'}", "model.ffn.type"),
    "a relative module": (b"model: {ffn: '..:b'}", "model.ffn.type"),
    "a file that is not there": (b"model: {ffn: 'no.py:b'}", "model.ffn.type"),
    "a device": (b"model: {ffn: '/dev/null:b'}", "model.ffn.type"),
    "a function": (b"model: {ffn: 'os:system'}", "model.ffn.type"),
    "YAML 1.1's octal": (b"seed: 010", "seed"),
    "a time": (b"seed: 1:30", "seed"),
    "a date": (b"seed: 2024-13-45", "seed"),
    "hexadecimal": (b"seed: 0x10", "seed"),
    "an underscore": (b"seed: 1_000", "seed"),
    "a float for an int": (b"seed: 1e3", "seed"),
    "too large for a float": (b"optimizer: {learning_rate: 1e999}", "optimizer.learning_rate"),
    "too small for a float": (b"optimizer: {learning_rate: 1e-999}", "optimizer.learning_rate"),
    "5000 digits": (b"optimizer: {learning_rate: %s.0}" % (b"9" * 5000), "optimizer.learning_rate"),
    "a layer that is no layer": (b"model: {ffn_at: {null: dense}}", "model.ffn_at"),
    "a layer far away": (b"model: {ffn_at: {99999999999999999999: dense}}", "model.ffn_at"),
    "a NUL in a path": (b'run: {output_dir: "a\\0b"}', "run.output_dir"),
    "a surrogate": (b'run: {name: "\\ud800"}', "run.name"),
    "more experts than fit": (b"model: {ffn: {num_experts: 1000000000}}", "model"),
    "a long folder": (b"run: {name: %s}" % (b"n" * 300), "run.name"),
}
"""By name: the config, and the key that is named."""


SIZES = ("model.num_layers", "model.d_model", "data.batch_size")


def _flow(key: str, value: int) -> bytes:
    *above, name = key.split(".")
    return (
        "".join(f"{part}: {{" for part in above).encode()
        + f"{name}: {value}".encode()
        + b"}" * len(above)
    )


NAMED |= {
    f"{key} {size}": (_flow(key, size), key)
    for key in SIZES
    for size in (10**9, 10**10, 2**63, 10**30)
}

ACCEPTED = {
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
}
"""What looks odd and is right: the config, and what it says."""


def check_accepted(folder: Path) -> str:
    import yaml

    for name, (content, expected) in ACCEPTED.items():
        (folder / "mine.yaml").write_bytes(content)
        done = scene.run_here("--config", str(folder / "mine.yaml"), "--print-config")
        assert done.code == 0, f"{name}: {done.stderr}"
        for path, value in expected.items():
            found: Any = yaml.safe_load(done.stdout)
            for key in path.split("."):
                found = found[key]
            assert found == value, f"{name}: {path} is {found!r}, not {value!r}"
            assert type(found) is type(value), f"{name}: {path} is {found!r}, not {value!r}"
    return f"{len(ACCEPTED)} of {len(ACCEPTED)} accepted"


# -- whole processes


def _process_case(name: str, content: bytes, named: str) -> Case:
    def check(folder: Path) -> str:
        return check_process(folder, Mutation(content, named))

    return Case(f"process: {name}", check)


def check_process(folder: Path, mutation: Mutation) -> str:
    """The same, with the start of Python, from a folder that nobody else writes to."""
    import os
    import resource
    import subprocess

    def seconds_of_children() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    def attempt() -> Answer:
        before = seconds_of_children()
        done = subprocess.run(
            [sys.executable, "-m", "experiments.train", "--config", "mine.yaml"],
            cwd=folder,
            env=os.environ | {"PYTHONPATH": str(scene.REPOSITORY)},
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        seconds = seconds_of_children() - before
        return Answer(done.returncode, done.stdout, done.stderr, seconds)

    (folder / "mine.yaml").write_bytes(mutation.content)
    # The best of three, for what shares the processor slows the work too.
    best = min((attempt() for _ in range(3)), key=lambda answer: answer.seconds)
    check_refused(best, mutation, folder)
    return f"{best.seconds:.2f} s with the start of Python"


IN_PROCESSES = (
    "a billion laughs",
    "a billion laughs, merged",
    "a block that holds itself",
    "a Python object",
    "binary",
    "deep lists",
    "deep mappings",
    "many keys",
    "many values",
    "one long word",
    "10 MB",
    "10 MB in one line",
)


def _in_processes() -> Iterator[Case]:
    for name in IN_PROCESSES:
        yield _process_case(name, WHOLE[name], "--config mine.yaml")
    for name in ("a long type", "fifty keys", "a line break in a type", "a function"):
        yield _process_case(name, *NAMED[name])
    for name in ("model.num_layers 1000000000", "model.d_model 1000000000"):
        yield _process_case(name, *NAMED[name])
    yield _process_case("a misspelt key", b"model: {ffn: {num_expert: 4}}", "model.ffn.num_expert")
    yield _process_case("text for a number", b"seed: x", "seed")


def _cases() -> Iterator[Case]:
    def every(mutations: Any, *, short: bool) -> Any:
        def chosen() -> Iterator[Mutation]:
            for number, mutation in enumerate(mutations()):
                if short == (number % _SHORT_STEP == 0):
                    yield mutation

        return lambda folder: refuse_all(folder, chosen())

    for name, mutations in (
        ("every option, values of other kinds and out of range", wrong_values),
        ("every argument of lightning.Trainer, of other kinds", wrong_lightning_arguments),
        ("every option, misspelt", misspelt_keys),
        ("every key of every shipped file: misspelt, twice, another kind", mutated_keys),
        ("every shipped file, damaged as a whole", damaged_files),
    ):
        yield Case(f"{name} (every {_SHORT_STEP}th)", every(mutations, short=True), short=True)
        yield Case(f"{name} (the others)", every(mutations, short=False))
    for name, content in WHOLE.items():
        mutation = Mutation(content, "--config mine.yaml")
        yield Case(name, lambda folder, m=mutation: refuse_all(folder, [m]), short=True)
    for name, (content, named) in NAMED.items():
        mutation = Mutation(content, named)
        yield Case(name, lambda folder, m=mutation: refuse_all(folder, [m]), short=True)
    yield Case("what looks odd and is right", check_accepted, short=True)
    yield from _in_processes()


CHAPTER = Chapter(
    "configs",
    "A config that is wrong in any way gets exit code 2 within a second and up to three lines that "
    "name the key, and leaves nothing behind.",
    _cases,
)
