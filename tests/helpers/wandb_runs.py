"""The training program as a person starts it, in a process and a home folder of its own."""

from __future__ import annotations

import os
import subprocess
import sys
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ffn.runs.rows import flat
from moe_ffn.training.monitoring.json_lines import Row, read_lines

ROOT = Path(__file__).parents[2]
KEY = "0123456789" * 4
"""An API key that is well formed, and nobody's."""

_IN_A_TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
"""Runs its arguments in a pseudo-terminal where nobody types."""


@dataclass(frozen=True)
class Outcome:
    """How a run ended; `printed` is both streams, in order."""

    code: int
    printed: str
    seconds: float
    folder: Path
    home: Path

    @property
    def rows(self) -> list[dict[str, Any]]:
        """`metrics.jsonl`, with a key for each entry of a list."""
        lines = read_lines(self.folder / "metrics.jsonl", Row)
        return [{"step": line.step, **flat(line.values)} for line in lines]

    def wandb_folders(self) -> list[Path]:
        """What wandb wrote of the run."""
        return list((self.folder / "wandb").glob("*run-*"))


def train(
    config: Path,
    where: Path,
    *options: str,
    environment: dict[str, str] | None = None,
    terminal: bool = False,
    installed: bool = True,
) -> Outcome:
    """Two steps of the program in `where`, which has nobody's wandb settings but these.

    Args:
        terminal: whether it runs in one, where nobody types.
        installed: whether there is a wandb to import.
    """
    home = where / "home of the client"
    home.mkdir(exist_ok=True)
    program = [sys.executable] if installed else [sys.executable, "-S"]
    if not installed:
        environment = {**(environment or {}), "PYTHONPATH": _path_without_wandb(where / "packages")}
    command = [
        *program, "-m", "experiments.train",
        "--config", str(config),
        "--data.cache_dir", str(where / "cache"),
        "--run.name", "kept",
        "--trainer.max_steps", "2",
        "--logging.every_n_steps", "1",
        "--logging.churn_every_n_steps", "1",
        *options,
    ]  # fmt: skip
    if terminal:
        command = [sys.executable, "-c", _IN_A_TERMINAL, *command]
    start = time.perf_counter()
    done = subprocess.run(
        command,
        cwd=where,
        env={**client_environment(home), **(environment or {})},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=180,
        check=False,
    )
    seconds = time.perf_counter() - start
    return Outcome(done.returncode, done.stdout, seconds, where / "runs" / "kept", home)


def client_environment(home: Path) -> dict[str, str]:
    """This process's, activated, without anybody's wandb settings."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_") and k != "NETRC"}
    return {
        **kept,
        "HOME": str(home),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "COLUMNS": "200",
        "OMP_NUM_THREADS": "1",
    }


def _path_without_wandb(links: Path) -> str:
    """A PYTHONPATH of all that is installed except wandb, for a Python started with `-S`."""
    links.mkdir()
    for package in Path(sysconfig.get_paths()["purelib"]).iterdir():
        if not package.name.startswith("wandb"):
            (links / package.name).symlink_to(package)
    return f"{ROOT}{os.pathsep}{links}"
