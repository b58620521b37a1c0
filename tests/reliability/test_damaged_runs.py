"""A run whose config, tokenizer, facts, summary or logs are damaged is refused in a line that names the file,
or repaired and said to be; its page is made without the file.
"""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from moe_ffn.config.errors import ConfigError
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
from moe_ffn.runs.reader import load_model
from tests.helpers.damages import Damage, cut, garbage, holding
from tests.helpers.same_run import differences
from tests.helpers.tiny_runs import (
    NEWEST,
    finished_copy,
    options,
    run_here,
    trained,
    unfinished_copy,
)


def garbage_in_the_middle(path: Path) -> None:
    content = bytearray(path.read_bytes())
    middle = len(content) // 2
    content[middle : middle + 8] = b'\x00\xff"\n\xfe{[\x80'[: len(content) - middle]
    path.write_bytes(content)


def another_rate(path: Path) -> None:
    text = path.read_text()
    assert "learning_rate: 0.003" in text
    path.write_text(text.replace("learning_rate: 0.003", "learning_rate: 0.007"))


ACCIDENTS: dict[str, Damage] = {
    "cut in two": cut(0.5),
    "empty": holding(b""),
    "garbage": garbage,
    "garbage in the middle": garbage_in_the_middle,
    "brackets without end": holding(b"[" * 99_000 + b"\n"),
    "one word without end": holding(b'"' + b"9" * 300_000 + b"\n"),
    "removed": Path.unlink,
}
"""What may become of any file."""

CONTENTS: dict[str, Damage] = {
    "one byte": holding(b"{"),
    "binary": holding(bytes(range(256))),
    "not UTF-8": holding(b"model: \xff"),
    "UTF-16": holding("{}".encode("utf-16")),
    "a list": holding(b"[1, 2]"),
    "a number": holding(b"3"),
    "a list that holds itself": holding(b"&a [*a]"),
    "a Python object": holding(b"!!python/object/apply:os.system ['touch hacked']"),
    "NaN": holding(b'{"seed": NaN, "routing": NaN, "type": NaN}'),
    "other kinds": holding(
        b'{"seed": [], "routing": [1], "model": 3, "loss": "x", "type": [1], "data": null}'
    ),
    "10 MB": holding(b"# \n" * 3_500_000),
}
"""What somebody may have put in the place of a YAML or JSON file."""

# -- training that goes on

RESUMED = (CONFIG_FILE, FACTS_FILE, TOKENIZER_FILE, METRICS_FILE, SAMPLES_FILE, ALARMS_FILE)
QUICK = (FACTS_FILE, "cut in two")


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        pytest.param(
            *(name, damage),
            id=f"{name}: {what}",
            marks=() if (name, what) == QUICK else pytest.mark.slow,
        )
        for name, (what, damage) in [
            *product(RESUMED, ACCIDENTS.items()),
            (CONFIG_FILE, ("another rate", another_rate)),
        ]
    ],
)
def test_a_run_that_goes_on(tmp_path: Path, name: str, damage: Damage) -> None:
    """It is refused by the file's name, or repaired with a line, or nothing is missing in the end."""
    folder = unfinished_copy(tmp_path)
    (folder / CHECKPOINTS_FOLDER / NEWEST).unlink()
    damage(folder / name)

    done = run_here("--resume", str(folder))

    if done.code == 2:
        (line,) = done.own_lines
        assert name in line or str(folder) in line, done.stderr
        return
    assert done.code == 0, done.stderr
    said = [line for line in done.stderr.splitlines() if name in line]
    assert len(said) <= 1, said
    lost = differences(trained(), folder)
    assert said or not lost, f"silently, {lost[:2]}"


# -- programs that read a run

READERS: dict[str, tuple[str, ...]] = {
    "generate": ("--num-tokens", "2"),
    "trace": ("--text", "import os"),
    "report": (),
}
"""With what each needs besides the run."""


@pytest.mark.slow
@pytest.mark.parametrize("what", ACCIDENTS | CONTENTS)
@pytest.mark.parametrize("name", [CONFIG_FILE, TOKENIZER_FILE, FACTS_FILE, SUMMARY_FILE])
def test_programs_that_read_a_run(tmp_path: Path, name: str, what: str) -> None:
    """Each does without the file, or refuses it by its name; a page is made in any case."""
    folder = finished_copy(tmp_path)
    (ACCIDENTS | CONTENTS)[what](folder / name)

    for program, argv in READERS.items():
        done = run_here(str(folder), *argv, program=f"moe_ffn.cli.{program}")

        assert done.code in ((0,) if program == "report" else (0, 2)), (program, done)
        if done.code == 2:
            assert len(done.stderr.splitlines()) <= 3, done.stderr
            assert name in done.stderr


@pytest.mark.slow
def test_flipped_bits_of_a_vocabulary(tmp_path: Path) -> None:
    """One flipped bit in the vocabulary of a BPE makes other text of the same weights."""
    bpe = {"data__tokenizer": "{type: bpe, vocab_size: 512}", "trainer__max_steps": "4"}
    done = run_here(*options(tmp_path, run__name="run", **bpe))
    assert done.code == 0, done.stderr
    path = tmp_path / "runs" / "run" / TOKENIZER_FILE
    good = path.read_bytes()
    load_model(path.parent)
    num_flips = 40
    for number in range(num_flips):
        damaged = bytearray(good)
        damaged[(len(good) - 1) * number // (num_flips - 1)] ^= 1 << number % 7
        path.write_bytes(damaged)
        try:
            load_model(path.parent)
        except ConfigError as error:
            said = str(error)
            assert TOKENIZER_FILE in said or "data.tokenizer" in said
        else:
            assert json.loads(damaged) == json.loads(good), "was loaded silently"
