"""A run whose other files are damaged: training that goes on with it, and the programs that read it."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from experiments.selftest.case import Case, Chapter
from experiments.selftest.checkpoint_damages import garbage
from experiments.selftest.finished_run import (
    NEWEST,
    finished_copy,
    finished_run,
    unfinished_copy,
)
from experiments.selftest.same_run import differences
from experiments.selftest.scene import options, run, run_here
from moe_ffn.errors import ConfigError
from moe_ffn.runs.folder import (
    ALARMS_FILE,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    FACTS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    TOKENIZER_FILE,
)

Do = Callable[[Path], object]
"""Damages a file."""

# -- damages


def _holding(content: bytes) -> Do:
    return lambda path: path.write_bytes(content)


def _cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def _garbage_in_the_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = b'\x00\xff"\n\xfe{[\x80'[: len(content) - middle]
    path.write_bytes(content)


def _another_number(path: Path) -> None:
    text = path.read_text()
    assert "learning_rate: 0.003" in text
    path.write_text(text.replace("learning_rate: 0.003", "learning_rate: 0.007"))


ACCIDENTS: dict[str, Do] = {
    "cut in two": _cut,
    "empty": _holding(b""),
    "garbage": garbage,
    "garbage in the middle": _garbage_in_the_middle,
    "brackets without end": _holding(b"[" * 99_000 + b"\n"),
    "one word without end": _holding(b'"' + b"9" * 300_000 + b"\n"),
    "removed": lambda path: path.unlink(),
}
"""What may become of any file."""

CONTENTS: dict[str, Do] = {
    "one byte": _holding(b"{"),
    "binary": _holding(bytes(range(256))),
    "not UTF-8": _holding(b"model: \xff"),
    "UTF-16": _holding("{}".encode("utf-16")),
    "a list": _holding(b"[1, 2]"),
    "a number": _holding(b"3"),
    "a list that holds itself": _holding(b"&a [*a]"),
    "a Python object": _holding(b"!!python/object/apply:os.system ['touch hacked']"),
    "NaN": _holding(b'{"seed": NaN, "routing": NaN, "type": NaN}'),
    "other kinds": _holding(
        b'{"seed": [], "routing": [1], "model": 3, "loss": "x", "type": [1], "data": null}'
    ),
    "10 MB": _holding(b"# \n" * 3_500_000),
}
"""What somebody may have put in the place of a YAML or JSON file."""

# -- training that goes on

RESUMED = (CONFIG_FILE, FACTS_FILE, TOKENIZER_FILE, METRICS_FILE, SAMPLES_FILE, ALARMS_FILE)


def _resumed_case(name: str, damage: Do) -> Callable[[Path], str]:
    """It is refused by its name, or mended with a line, or nothing is missing in the end."""

    def check(folder: Path) -> str:
        copied = unfinished_copy(folder)
        (copied / CHECKPOINTS_FOLDER / NEWEST).unlink()
        damage(copied / name)
        done = run_here("--resume", str(copied))
        if done.code == 2:
            (line,) = done.own_lines
            assert name in line or str(copied) in line, done.stderr
            return f"refused: {line.removeprefix('error: ').replace(str(copied), 'RUN')}"
        assert done.code == 0, done.stderr
        said = [line for line in done.stderr.splitlines() if name in line]
        assert len(said) <= 1, said
        lost = differences(finished_run(), copied)
        assert said or not lost, f"silently, {lost[:2]}"
        return f"mended: {said[0].replace(str(copied), 'RUN')}" if said else "nothing is lost"

    return check


# -- programs that read a run

READERS: dict[str, tuple[str, ...]] = {
    "generate": ("--num-tokens", "2"),
    "trace": ("--text", "import os"),
    "report": (),
}
"""With what each needs besides the run."""

READ = (CONFIG_FILE, TOKENIZER_FILE, FACTS_FILE, SUMMARY_FILE)


def _read_case(name: str) -> Callable[[Path], str]:
    """All damages of one file; the broken promises are told together."""

    def check(folder: Path) -> str:
        broken: list[str] = []
        counts = {0: 0, 2: 0}
        for what, damage in (ACCIDENTS | CONTENTS).items():
            damaged = finished_copy(folder)
            damage(damaged / name)
            for program in READERS:
                problem = _problem(program, damaged, name, counts)
                if problem:
                    broken.append(f"{program}, {name} {what}: {problem}")
            shutil.rmtree(damaged)
        total = len(ACCIDENTS | CONTENTS) * len(READERS)
        assert not broken, f"{len(broken)} of {total} broken: {'; '.join(broken[:6])}"
        return (
            f"{total} answers: {counts[2]} refused by the file's name, {counts[0]} done without it"
        )

    return check


def _problem(program: str, damaged: Path, name: str, counts: dict[int, int]) -> str:
    """What is wrong with the answer; empty where nothing is.

    Args:
        counts: of exit codes, to which that of the answer is added.
    """
    try:
        done = run_here(str(damaged), *READERS[program], program=f"experiments.{program}")
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    if done.code not in counts:
        return f"exit code {done.code}, {done.stderr[:200]!r}"
    counts[done.code] += 1
    if done.code == 0:
        return ""
    num_lines = len(done.stderr.splitlines())
    if not 1 <= num_lines <= 3:
        return f"{num_lines} lines, {done.stderr[:200]!r}"
    if name not in done.stderr:
        return f"does not name the file: {done.stderr[:200]!r}"
    return f"no page: {done.stderr[:200]!r}" if program == "report" else ""


def _flipped_bits_of_a_vocabulary(folder: Path) -> str:
    """One flipped bit in the vocabulary of a BPE makes other text of the same weights."""
    from moe_ffn.runs.saved_model import load_model

    vocabulary = "{type: bpe, vocab_size: 512}"
    done = run(
        *options(folder, run__name="run", data__tokenizer=vocabulary, trainer__max_steps="4")
    )
    assert done.code == 0, done.stderr
    path = folder / "runs" / "run" / TOKENIZER_FILE
    good = path.read_bytes()
    load_model(path.parent)
    silent, num_flips = 0, 40
    for number in range(num_flips):
        damaged = bytearray(good)
        damaged[(len(good) - 1) * number // (num_flips - 1)] ^= 1 << number % 7
        path.write_bytes(damaged)
        try:
            load_model(path.parent)
        except ConfigError as error:
            said = str(error)
            assert TOKENIZER_FILE in said or "data.tokenizer" in said, said
        else:
            silent += json.loads(damaged) != json.loads(good)
    assert not silent, f"{silent} of {num_flips} flipped bits were loaded silently"
    return f"{num_flips} of {num_flips} flipped bits refused, or without any effect"


def _cases() -> Iterator[Case]:
    for name in RESUMED:
        for what, damage in ACCIDENTS.items():
            yield Case(f"resumed, {name}: {what}", _resumed_case(name, damage))
    changed = _resumed_case(CONFIG_FILE, _another_number)
    yield Case(f"resumed, {CONFIG_FILE}: another number", changed)
    for name in READ:
        yield Case(f"read, {name}: {len(ACCIDENTS | CONTENTS)} damages", _read_case(name))
    yield Case(f"read, {TOKENIZER_FILE}: flipped bits", _flipped_bits_of_a_vocabulary)


CHAPTER = Chapter(
    "runs",
    "A run whose config, tokenizer, facts, summary or logs are damaged is refused in a line that names the "
    "file, or mended and said to be; its page is made without the file.",
    _cases,
)
