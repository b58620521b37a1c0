"""How a program answers what is hostile: the checks that the tables of cases share."""

from __future__ import annotations

import io
import time
from contextlib import redirect_stderr
from pathlib import Path

from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.config.errors import ConfigError
from tests.helpers.snapshot import snapshot
from tests.helpers.tiny_runs import Finished, run_here

MAX_SECONDS = 5
LONG = "x" * 5_000
MANY_DIGITS = "9" * 5_000


def check_sentence(said: str, named: str) -> None:
    """One line that a person can read on a terminal, and that names what is at fault."""
    lines = said.splitlines()
    assert 1 <= len(lines) <= 3, said
    assert named in said, said
    assert max(map(len, lines)) < 700, f"{max(map(len, lines))} characters: {said[:900]}"
    assert all(line.isprintable() for line in lines), repr(said)


def check_answer(program: str, *argv: str, named: str | None) -> Finished:
    """Refused by `named` without anything written, or, with None, done.

    What would end the program with a traceback is raised here.
    """
    before, start = snapshot(Path()), time.process_time()
    package = "experiments" if program in ("benchmark", "overhead") else "moe_ffn.cli"
    done = run_here(*argv, program=f"{package}.{program}")
    assert time.process_time() - start < MAX_SECONDS, "took long"
    if named is None:
        assert done.code == 0, done.stderr
    else:
        assert done.code == 2, done
        check_sentence("\n".join(done.own_lines), named)
        assert snapshot(Path()) == before, "something was left"
    return done


def as_printed(error: ConfigError) -> str:
    """What a program prints of it."""

    def fail(_: object) -> int:
        raise error

    with redirect_stderr(io.StringIO()) as stderr:
        assert exit_on_bad_input(fail) == 2
    return stderr.getvalue()
