"""No network at all: the quickstart, cut off from everything."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
import unittest
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from experiments.selftest.case import Case, Chapter
from experiments.selftest.scene import REPOSITORY, options

SECONDS_AT_MOST = 240
"""For one program. Each waits for nothing, so this is what a slow machine computes."""

KEY = "0123456789" * 4
"""An API key that is well formed, and nobody's."""

_TRAIN = ("-m", "experiments.train")
_IN_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
"""Runs its arguments in a pseudo-terminal where nobody types."""
_PROMPT = re.compile(r"enter your choice|api key and hit enter|/authorize|\[y/n\]", re.IGNORECASE)
_CONNECT = "import socket; socket.create_connection(('192.0.2.1', 443), timeout=5)"


def cases() -> Iterable[Case]:
    yield Case("the package and every program's help", _package_and_help)
    yield Case("a tiny run", _tiny_run, short=True)
    yield Case("the quickstart", lambda folder: _quickstart(folder))
    yield Case("the quickstart, in a terminal", lambda folder: _quickstart(folder, terminal=True))
    yield Case(
        "the quickstart, with a key for wandb",
        lambda folder: _quickstart(folder, WANDB_API_KEY=KEY),
    )
    yield Case(
        "the quickstart, with a key for wandb and in a terminal",
        lambda folder: _quickstart(folder, terminal=True, WANDB_API_KEY=KEY),
    )


CHAPTER = Chapter(
    "offline",
    "In a network namespace without a route the quickstart works to its end: no prompt, nothing waited for.",
    cases,
)


def _quickstart(folder: Path, *, terminal: bool = False, **environment: str) -> str:
    """What the README begins with, in three steps instead of hundreds."""
    trained = _cut_off(
        folder,
        *_TRAIN,
        *("--run.name", "my-run", "--trainer.max_steps", "3", "--data.validation_tokens", "4096"),
        terminal=terminal,
        **environment,
    )
    _check(trained, "validation loss")
    assert "wandb: offline" in trained.printed, f"of wandb it says: {trained.about_wandb}"
    run = folder / "runs" / "my-run"
    for name in ("config.yaml", "metrics.jsonl", "summary.json", "report.html", "checkpoints"):
        assert (run / name).exists(), f"the run has no {name}"
    seconds = [trained.seconds]
    for argv, shown in (
        (("experiments.generate", str(run), "--prompt", "class "), "class "),
        (("experiments.report", str(run)), "report.html"),
        (("experiments.trace", str(run), "--text", "import os"), "next: the token"),
    ):
        ended = _cut_off(folder, "-m", *argv, terminal=terminal, **environment)
        _check(ended, shown)
        seconds.append(ended.seconds)
    return f"training {seconds[0]:.1f} s, the others {max(seconds[1:]):.1f} s at most"


def _tiny_run(folder: Path) -> str:
    argv = options(folder, run__name="tiny", trainer__max_steps="2", logging__wandb__mode="auto")
    ended = _cut_off(folder, *_TRAIN, *argv)
    _check(ended, "validation loss")
    assert "wandb: offline" in ended.printed, f"of wandb it says: {ended.about_wandb}"
    return f"{ended.seconds:.1f} s"


def _package_and_help(folder: Path) -> str:
    build = "import moe_ffn; moe_ffn.build_ffn('moe', d_model=8)"
    _check(_cut_off(folder, "-c", f"{build}; print('built')"), "built")
    programs = ("train", "generate", "report", "trace", "dashboard", "benchmark", "compare")
    for program in programs:
        _check(_cut_off(folder, "-m", f"experiments.{program}", "--help"), f"experiments.{program}")
    dashboard = ("-m", "experiments.dashboard", "--entity", "me", "--project", "moe_ffn")
    _check(_cut_off(folder, *dashboard, "--json", "-"), '"sections"')
    return f"{len(programs)} programs"


# --------------------------------------------------------------------------------- cutting off


@dataclass(frozen=True)
class _Ended:
    """A program that has ended; `printed` is both of its streams."""

    code: int
    printed: str
    seconds: float

    @property
    def about_wandb(self) -> str:
        return " | ".join(line for line in self.printed.splitlines() if "wandb" in line)


def _cut_off(folder: Path, *argv: str, terminal: bool = False, **environment: str) -> _Ended:
    """Python with these arguments, where there is no network but a loopback that is down.

    Started in `folder`, where its home is too, so that nobody's keys and settings are found.
    """
    home = folder / "home"
    home.mkdir(exist_ok=True)
    known = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and k != "NETRC"}
    ours = {"HOME": str(home), "PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *argv]
    if terminal:
        command = [sys.executable, "-c", _IN_A_TERMINAL, *command]
    unshare = _unshare()
    began = time.perf_counter()
    ended = subprocess.run(
        [*unshare, *command],
        cwd=folder,
        env=known | ours | {"COLUMNS": "200"} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=SECONDS_AT_MOST,
        check=False,
    )
    return _Ended(ended.returncode, ended.stdout, time.perf_counter() - began)


@cache
def _unshare() -> tuple[str, ...]:
    """The command that cuts another off, once it is seen to do so.

    Raises:
        SkipTest: this machine permits nobody to make a network namespace.
    """
    said = []
    for how in ("-rn", "-n"):
        command = ("unshare", how)
        try:
            subprocess.run([*command, "true"], check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            said.append(getattr(error, "stderr", None) or str(error))
            continue
        tried = subprocess.run(
            [*command, sys.executable, "-c", _CONNECT], capture_output=True, text=True, check=False
        )
        assert "Network is unreachable" in tried.stderr, f"{command} cuts nothing off: {tried}"
        return command
    raise unittest.SkipTest(
        f"nothing was tried: this machine permits no network namespace ({said[0].strip()})"
    )


def _check(ended: _Ended, shown: str) -> None:
    assert ended.code == 0, f"exit code {ended.code}: {ended.printed[-500:]}"
    assert shown in ended.printed, f"no '{shown}' in: {ended.printed[-500:]}"
    assert "Traceback" not in ended.printed, ended.printed[-1000:]
    asked = _PROMPT.search(ended.printed)
    assert asked is None, f"it asked: {asked}"
