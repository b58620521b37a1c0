"""What the other programs say of a run whose small files are damaged."""

from __future__ import annotations

import contextlib
import io
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from unittest.mock import patch

from experiments.selftest import scene
from experiments.selftest.case import Case, Chapter

DAMAGES: dict[str, bytes] = {
    "empty": b"",
    "one byte": b"{",
    "binary": bytes(range(256)),
    "not UTF-8": b"model: \xff",
    "UTF-16": "{}".encode("utf-16"),
    "a list": b"[1, 2]",
    "a number": b"3",
    "a list that holds itself": b"&a [*a]",
    "a Python object": b"!!python/object/apply:os.system ['touch hacked']",
    "deep": b"[" * 5_000,
    "NaN": b'{"seed": NaN, "routing": NaN, "type": NaN}',
    "other kinds": b'{"seed": [], "routing": [1], "model": 3, "loss": "x", "type": [1], "data": null}',
    "10 MB": b"# \n" * 3_500_000,
}
"""In the place of a file of the run."""

READERS: dict[str, tuple[str, ...]] = {
    "generate": ("--num-tokens", "2"),
    "trace": ("--text", "import os"),
    "report": (),
}
"""Programs that read a run, with what else they need."""

FILES = ("config.yaml", "tokenizer.json", "facts.json", "summary.json")


def finished_run(folder: Path) -> Path:
    """A run of two steps, made once for all damages."""
    done = scene.run(*scene.options(folder, trainer__max_steps="2", run__name="mine"))
    assert done.code == 0, done.stderr[-500:]
    return folder / "runs" / "mine"


def ask(program: str, run: Path) -> tuple[int, str]:
    """Exit code and stderr of a program, in this process."""
    import importlib

    from experiments.exit import exit_on_bad_input

    main: Callable[[Sequence[str]], int] = importlib.import_module(
        f"experiments.{program}" if program == "generate" else f"experiments.{program}.__main__"
    ).main
    stderr = io.StringIO()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(stderr),
        warnings.catch_warnings(),
        patch.object(sys, "argv", [program, str(run), *READERS[program]]),
    ):
        code = exit_on_bad_input(main)
    return code, stderr.getvalue()


def _check(files: Sequence[str], damages: Sequence[str]) -> Callable[[Path], str]:
    def check(folder: Path) -> str:
        run, broken, counts = finished_run(folder), [], {0: 0, 2: 0}
        for file in files:
            for damage in damages:
                damaged = folder / "damaged"
                shutil.copytree(run, damaged)
                (damaged / file).write_bytes(DAMAGES[damage])
                for program in READERS:
                    problem = _problem(program, damaged, file, counts)
                    if problem:
                        broken.append(f"{program}, {file} {damage}: {problem}")
                shutil.rmtree(damaged)
        total = len(files) * len(damages) * len(READERS)
        assert not broken, f"{len(broken)} of {total} broken: {'; '.join(broken[:6])}"
        return (
            f"{total} answers: {counts[2]} refused by the file's name, {counts[0]} done without it"
        )

    return check


def _problem(program: str, run: Path, file: str, counts: dict[int, int]) -> str:
    """What is wrong with the answer; empty where nothing is."""
    try:
        code, stderr = ask(program, run)
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:200]}"
    if code not in counts:
        return f"exit code {code}, {stderr[:200]!r}"
    counts[code] += 1
    if code == 2 and not 1 <= len(stderr.splitlines()) <= 3:
        return f"{len(stderr.splitlines())} lines, {stderr[:200]!r}"
    if code == 2 and file not in stderr:
        return f"does not name the file: {stderr[:200]!r}"
    if program == "report" and code == 2:
        return f"no page: {stderr[:200]!r}"
    return ""


def _cases() -> Iterator[Case]:
    for file in FILES:
        yield Case(f"damaged {file}", _check([file], list(DAMAGES)))


CHAPTER = Chapter(
    "runs",
    "a run whose config, tokenizer, facts or summary is damaged is refused in a line that names the "
    "file, and its page is made without it",
    lambda: list(_cases()),
)
