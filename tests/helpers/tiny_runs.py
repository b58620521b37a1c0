"""Tiny runs on a small corpus, in this process or in new ones, and a finished run to damage."""

from __future__ import annotations

import atexit
import contextlib
import io
import json
import multiprocessing
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.runs.folder import CHECKPOINTS_FOLDER, METRICS_FILE, SUMMARY_FILE
from moe_ffn.runs.train import ending
from moe_ffn.training.monitoring.json_lines import Row, read_lines
from moe_ffn.training.recovery.checkpoint_file import step_name

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
    "sample.num_tokens": "2",
}
"""Options of a run that takes a second of training; every case may replace some."""


# -- programs


PROGRESS = ("training: ", "resuming ", "importing ", "data: ")
"""Beginnings of the lines that a program logs before its work."""


class Finished(NamedTuple):
    """A program that has ended."""

    code: int
    """Negative: the number of the signal that killed it."""
    stdout: str
    stderr: str

    @property
    def own_lines(self) -> list[str]:
        """Lines of stderr without the progress lines before them."""
        lines = self.stderr.splitlines()
        return [line for line in lines if not line.startswith(PROGRESS)]

    @property
    def mistake(self) -> str:
        """The one line of a program that rejects what it was given, without `error: `."""
        assert (self.code, self.stdout) == (2, ""), self
        (line,) = self.own_lines
        return line.removeprefix("error: ")


def environment(**changes: str) -> dict[str, str]:
    """Environment of this process with one thread, a wide terminal, this checkout and the changes."""
    ours = {"OMP_NUM_THREADS": "1", "COLUMNS": "200", "PYTHONPATH": str(REPOSITORY)}
    return os.environ | ours | changes


def python_words(program: str) -> list[str]:
    """Return the words after `python` that run the program of a module."""
    return ["-m", *program.replace("moe_ffn.cli.", "moe_ffn.cli ").split()]


def start(*argv: str, program: str = "experiments.train", **changes: str) -> subprocess.Popen[str]:
    """Start a program of the project in a new process, with changes to its environment."""
    return start_command([sys.executable, *python_words(program), *argv], **changes)


def start_script(script: str, *argv: str) -> subprocess.Popen[str]:
    return start_command([sys.executable, str(Path(__file__).with_name(script)), *argv])


def start_command(command: Sequence[str], **changes: str) -> subprocess.Popen[str]:
    """Any command, with one thread and no terminal."""
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        env=environment(**changes),
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


def run(*argv: str, program: str = "experiments.train", **changes: str) -> Finished:
    """Start a program of the project and wait for its end."""
    return finish(start(*argv, program=program, **changes))


def run_here(*argv: str, program: str = "experiments.train", has_page: bool = False) -> Finished:
    """Run a program in this process, which has imported all that it needs.

    Args:
        has_page: False leaves the page of a run that is trained empty: drawing it takes a third of the time.

    Raises:
        Exception: whatever would have ended the program with a traceback.
    """
    module = import_module(program)
    main = import_module(f"{program}.__main__").main if hasattr(module, "__path__") else module.main
    stdout, stderr = io.StringIO(), io.StringIO()
    trains = program in ("experiments.train", "moe_ffn.cli.train")
    with (
        patch.object(
            ending, "report_html", ending.report_html if has_page or not trains else no_page
        ),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
        warnings.catch_warnings(),
        patch.object(sys, "argv", [program, *argv]),
    ):
        code = exit_on_bad_input(main)
    return Finished(code, stdout.getvalue(), stderr.getvalue())


def cli(name: str, *always: str, columns: int = 200) -> Callable[..., Finished]:
    """Return the program `moe-ffn NAME`, run here on a terminal of so many columns, without progress lines.

    Args:
        always: arguments of every call, after its own.
    """

    def run(*argv: object) -> Finished:
        with patch.dict(os.environ, COLUMNS=str(columns)):
            done = run_here(*map(str, argv), *always, program=f"moe_ffn.cli.{name}")
        return done._replace(stderr="".join(f"{line}\n" for line in done.own_lines))

    return run


def no_page(*_runs: object, **_options: object) -> str:
    return ""


class ForkedTraining:
    """Substitute for the `subprocess.Popen` of a sweep: runs its command in a copy of this process."""

    has_page = False
    """False leaves the page of the run empty, as in `run_here`."""

    def __init__(self, command: Sequence[str], **options: Any) -> None:
        """
        Args:
            command: trains a run.
            options: of Popen, of which `stdout` is regarded.
        """

        def work() -> None:
            os.setsid()
            os.environ |= options["env"]
            if not self.has_page:
                ending.report_html = no_page
            sys.stdout = sys.stderr = os.fdopen(os.dup(options["stdout"].fileno()), "w", 1)
            sys.argv = ["train", *command[command.index("train") + 1 :]]
            raise SystemExit(exit_on_bad_input(import_module("moe_ffn.cli.train").main))

        self._copy = fork(work)
        self.pid = self._copy.pid

    def poll(self) -> int | None:
        return self._copy.exitcode

    def wait(self) -> None:
        self._copy.join()

    def send_signal(self, signum: int) -> None:
        assert self.pid is not None
        os.kill(self.pid, signum)


def fork(work: Callable[[], object]) -> ForkProcess:
    """Do it in a copy of this process: it has torch imported, which takes another one longer than a run."""
    with warnings.catch_warnings():
        # Of threads, which the copy lacks: those of pytest wait, and torch has none on one CPU.
        warnings.simplefilter("ignore", DeprecationWarning)
        copy = multiprocessing.get_context("fork").Process(target=work)
        copy.start()
    return copy


def fork_all(works: Iterable[Callable[[], object]]) -> list[int | None]:
    """Do all at once; returns exit codes, negative of those that a signal has killed."""
    copies = [fork(work) for work in works]
    for copy in copies:
        copy.join()
    return [copy.exitcode for copy in copies]


# -- tiny runs


def lasting_folder() -> Path:
    """A new folder that is removed when the process ends, for what many cases share."""
    folder = tempfile.TemporaryDirectory(prefix="reliability-")
    atexit.register(folder.cleanup)
    return Path(folder.name)


def write_corpus(folder: Path, num_files: int = 12) -> Path:
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


def losses(run_folder: Path) -> dict[int, float]:
    """The training loss of every row that has one, by its step."""
    rows = map(dict, read_lines(run_folder / METRICS_FILE, Row))
    return {row["step"]: row["train/loss"] for row in rows if "train/loss" in row}


def wait_for_row(
    folder: Path, step: int, process: subprocess.Popen[str], timeout: float = 180
) -> None:
    """Return once the run in `folder` has written a row of optimizer step `step` or a later one."""
    deadline = time.monotonic() + timeout
    while not any(row.step >= step for row in read_lines(folder / METRICS_FILE, Row)):
        assert process.poll() is None, f"ended before step {step}: {finish(process).stderr}"
        assert time.monotonic() < deadline, f"not at step {step} after {timeout:g} s"
        time.sleep(0.01)


# -- a finished run, made once, of which every case changes a copy

OLDER, NEWEST, BEST = step_name(8), step_name(12), "best.ckpt"
WITH_ALARMS = {"logging__alarms__router_logit": "0.01"}
"""Options of the finished run, in addition to those of a tiny run."""


@cache
def _shared_folder() -> Path:
    return lasting_folder()


@cache
def trained(**changes: str) -> Path:
    """A finished run with checkpoints of steps 8 and 12 and alarms; read-only by convention."""
    given = WITH_ALARMS | changes
    name = "-".join(["run", *(part for change in changes.items() for part in change)])
    done = run_here(*options(_shared_folder(), run__name=name, **given))
    assert done.code == 0, done.stderr
    found = _shared_folder() / "runs" / name
    assert {path.name for path in (found / CHECKPOINTS_FOLDER).iterdir()} == {BEST, OLDER, NEWEST}
    return found


def finished_copy(folder: Path) -> Path:
    """A copy of the finished run in a new folder."""
    return Path(shutil.copytree(trained(), folder / "run"))


def unfinished_copy(folder: Path) -> Path:
    """A copy of the run, as if its process had died just before its end."""
    copied = finished_copy(folder)
    (copied / SUMMARY_FILE).unlink()
    return copied


def on_terminal(program: str, *argv: str, interrupt_at: bytes | None = None) -> tuple[int, str]:
    """Run a program; return its exit code and the characters that it sent to its terminal.

    Args:
        interrupt_at: pattern in what it sent after which Ctrl-C is pressed once.
    """
    own, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *python_words(program), *argv],
        cwd=REPOSITORY,
        env=environment(TERM="xterm", COLUMNS="100"),
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
    )
    os.close(its)
    sent = b""
    with suppress(OSError):  # the last process on it has ended
        while block := os.read(own, 65_536):
            sent += block
            if interrupt_at is not None and re.search(interrupt_at, sent):
                process.send_signal(signal.SIGINT)
                interrupt_at = None
    os.close(own)
    return process.wait(timeout=60), sent.decode()


CHOICES = (
    {"question": "the cat sat on", "choices": [" a mat.", " qqqq"], "answer": 0},
    {"question": "def f(x):\n    return", "choices": [" zz", " x\n", " é"], "answer": 1},
)
TEXTS = ({"text": "the cat sat on a mat.\nthe cat sat on a mat.\n"}, {"text": "def f(x):\n"})


def write_tasks(folder: Path) -> None:
    """Write two tasks of lm-eval: a choice among continuations, and the perplexity of texts."""
    folder.mkdir()
    for name, rows in (("choices", CHOICES), ("texts", TEXTS)):
        lines = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines)
    common = (
        "dataset_path: json\ntest_split: test\n"
        f"dataset_kwargs: {{data_files: {{test: {folder}/%s.jsonl}}, cache_dir: {folder}/cache}}\n"
    )
    (folder / "choice.yaml").write_text(
        "task: tiny_choice\noutput_type: multiple_choice\n"
        + common % "choices"
        + """\
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
target_delimiter: ""
metric_list:
  - {metric: acc, aggregation: mean, higher_is_better: true}
"""
    )
    (folder / "rolling.yaml").write_text(
        "task: tiny_rolling\noutput_type: loglikelihood_rolling\n"
        + common % "texts"
        + """\
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list:
  - {metric: byte_perplexity, aggregation: weighted_perplexity, higher_is_better: false}
  - {metric: bits_per_byte, aggregation: bits_per_byte, higher_is_better: false}
"""
    )
