"""In a network namespace without a route the quickstart works to its end: no prompt, nothing waited for."""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from moe_ffn.cli import __main__ as console
from tests.helpers.programs import python_words
from tests.helpers.tiny_runs import Finished, environment, options

pytestmark = pytest.mark.slow

MAX_SECONDS = 240
"""For one program. Each waits for nothing, so this is what a slow machine computes."""
KEY = {"WANDB_API_KEY": "0123456789" * 4}
"""An API key that is well formed, and nobody's."""
PROGRAMS = (*(f"moe_ffn.cli.{name}" for name in console.PROGRAMS), "experiments.benchmark")

IN_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
"""Runs its arguments in a pseudo-terminal where nobody types."""
PROMPT = re.compile(r"enter your choice|api key and hit enter|/authorize|\[y/n\]", re.IGNORECASE)
CONNECT = "import socket; socket.create_connection(('192.0.2.1', 443), timeout=5)"


def test_a_tiny_run(tmp_path: Path) -> None:
    argv = options(tmp_path, trainer__max_steps="2", logging__wandb__mode="auto")

    ended = cut_off(tmp_path, "-m", "experiments.train", *argv)

    check_ended(ended, "validation loss")
    check_ended(ended, "wandb: offline")


@pytest.mark.parametrize("variables", [{}, KEY], ids=["", "with a key for wandb"])
@pytest.mark.parametrize("terminal", [False, True], ids=["", "in a terminal"])
def test_the_quickstart(tmp_path: Path, terminal: bool, variables: dict[str, str]) -> None:
    """What the README begins with, in three steps instead of hundreds."""
    few = {"run.name": "my-run", "trainer.max_steps": "3", "data.validation_tokens": "4096"}
    options = [part for key, value in few.items() for part in (f"--{key}", value)]

    trained = cut_off(tmp_path, "-m", "experiments.train", *options, terminal=terminal, **variables)

    check_ended(trained, "validation loss")
    check_ended(trained, "wandb: offline")
    run = tmp_path / "runs" / "my-run"
    assert (run / "summary.json").exists()
    for (program, *argv), shown in (
        (("generate", str(run), "--prompt", "class "), "class "),
        (("report", str(run)), "report.html"),
        (("trace", str(run), "--text", "import os"), "next: the token"),
    ):
        words = ("-m", "moe_ffn.cli", program, *argv)
        check_ended(cut_off(tmp_path, *words, terminal=terminal, **variables), shown)


def test_the_package(tmp_path: Path) -> None:
    build = "import moe_ffn; moe_ffn.build_ffn('moe', d_model=8); print('built')"

    check_ended(cut_off(tmp_path, "-c", build), "built")


@pytest.mark.parametrize("program", PROGRAMS)
def test_the_help_of_a_program(tmp_path: Path, program: str) -> None:
    ended = cut_off(tmp_path, *python_words(program), "--help")

    check_ended(ended, f"{program.rpartition('.')[2]} ")


def test_a_dashboard_as_json(tmp_path: Path) -> None:
    argv = ("--entity", "me", "--project", "moe_ffn", "--json")

    check_ended(cut_off(tmp_path, "-m", "moe_ffn.cli", "dashboard", *argv), '"sections"')


def cut_off(folder: Path, *argv: str, terminal: bool = False, **variables: str) -> Finished:
    """Python with these arguments, where there is no network but a loopback that is down.

    Started in `folder`, where its home is too, so that nobody's keys and settings are found.
    """
    home = folder / "home"
    home.mkdir(exist_ok=True)
    command = [sys.executable, *argv]
    if terminal:
        command = [sys.executable, "-c", IN_A_TERMINAL, *command]
    ours = environment(HOME=str(home))
    known = {k: v for k, v in ours.items() if not k.startswith("WANDB_") and k != "NETRC"}
    ended = subprocess.run(
        [*unshare(), *command],
        cwd=folder,
        env=known | variables,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=MAX_SECONDS,
        check=False,
    )
    return Finished(ended.returncode, ended.stdout, "")


def unshare() -> tuple[str, ...]:
    """The command that cuts another off; the test is skipped where this machine has none."""
    command, why = how_to_unshare()
    if command is None:
        pytest.skip(f"this machine permits no network namespace ({why})")
    return command


@cache
def how_to_unshare() -> tuple[tuple[str, ...] | None, str]:
    """The command, once it is seen to cut something off; or why there is none."""
    why = ""
    for how in ("-rn", "-n"):
        command = ("unshare", how)
        try:
            subprocess.run([*command, "true"], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = why or (getattr(error, "stderr", None) or str(error)).strip()
            continue
        python = [*command, sys.executable, "-c", CONNECT]
        tried = subprocess.run(python, capture_output=True, text=True, check=False)
        assert "Network is unreachable" in tried.stderr, f"{command} cuts nothing off: {tried}"
        return command, ""
    return None, why


def check_ended(ended: Finished, shown: str) -> None:
    printed = ended.stdout
    assert ended.code == 0, f"exit code {ended.code}: {printed[-500:]}"
    assert shown in printed, f"no '{shown}' in: {printed[-500:]}"
    assert "Traceback" not in printed, printed[-1000:]
    asked = PROMPT.search(printed)
    assert asked is None, f"it asked: {asked}"
