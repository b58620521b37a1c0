"""The scene of every case: a small corpus, and tiny runs in processes of their own."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from experiments.run_folder import METRICS_FILE

REPOSITORY = Path(__file__).parents[2]
_WORDS = ("the cat ", "sat on ", "a mat.\n", "def f(x):\n", "    return x\n")

TINY = {
    "model.d_model": "16",
    "model.num_layers": "2",
    "model.attention.num_heads": "2",
    "data.seq_len": "16",
    "data.batch_size": "4",
    "data.validation_tokens": "160",
    "logging.every_n_steps": "2",
    "logging.wandb.mode": "disabled",
    "trainer.max_steps": "12",
    "trainer.validate_every_n_steps": "4",
    "trainer.precision": "32-true",
    "trainer.accelerator": "cpu",
    "sample.num_tokens": "8",
}
"""Options of a run that takes a second of training; every case may replace some."""


@dataclass(frozen=True)
class Finished:
    """A process that has ended."""

    code: int
    """Negative: the number of the signal that killed it."""
    stdout: str
    stderr: str


def write_corpus(folder: Path, num_files: int = 12) -> Path:
    """A folder of small texts, always the same."""
    folder.mkdir(parents=True)
    for number in range(num_files):
        picked = [_WORDS[(number * place + place * place // 3) % 5] for place in range(60)]
        (folder / f"{number}.txt").write_text("".join(picked))
    return folder


def options(folder: Path, **changes: str) -> list[str]:
    """The command line of a tiny run in `folder`, which holds its corpus, cache and runs.

    Args:
        folder: made where it is not there.
        changes: dotted keys with `__` for each dot, as in `model__ffn="swiglu"`.
    """
    corpus = folder / "corpus"
    if not corpus.is_dir():
        write_corpus(corpus)
    places = {
        "data.corpus": f"{{type: text, paths: ['{corpus}']}}",
        "data.cache_dir": str(folder / "cache"),
        "run.output_dir": str(folder / "runs"),
    }
    given = {key.replace("__", "."): value for key, value in changes.items()}
    return [part for key, value in (TINY | places | given).items() for part in (f"--{key}", value)]


def start(
    *argv: str, program: str = "experiments.train", **environment: str
) -> subprocess.Popen[str]:
    """A program of the project in a process of its own, with one thread and no terminal."""
    return subprocess.Popen(
        [sys.executable, "-m", program, *argv],
        cwd=REPOSITORY,
        env=os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "200"} | environment,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finish(process: subprocess.Popen[str], timeout: float = 120) -> Finished:
    """Wait for its end; one that takes longer is killed, and TimeoutExpired raised."""
    try:
        stdout, stderr = process.communicate(timeout=timeout)
    except BaseException:
        process.kill()
        process.communicate()
        raise
    return Finished(process.returncode, stdout, stderr)


def run(*argv: str, program: str = "experiments.train", **environment: str) -> Finished:
    """Start a program of the project and wait for its end."""
    return finish(start(*argv, program=program, **environment))


def wait_for_row(
    folder: Path, step: int, process: subprocess.Popen[str], timeout: float = 60
) -> None:
    """Return once the run in `folder` has written a row of optimizer step `step` or a later one."""
    from moe_ffn.training.metrics_file import STEP, read_rows

    deadline = time.monotonic() + timeout
    while not any(int(row[STEP]) >= step for row in read_rows(folder / METRICS_FILE)):
        assert process.poll() is None, f"ended before step {step}: {finish(process).stderr}"
        assert time.monotonic() < deadline, f"not at step {step} after {timeout:g} s"
        time.sleep(0.01)
