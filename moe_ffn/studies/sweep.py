"""Train the runs of a study, several at a time, each in its own process.

A sweep reads the state of each run from its folder, so you can kill it at any time. The process of a run
inherits the lock on its log from the sweep, and holds it until it exits.
"""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from subprocess import DEVNULL, STDOUT, Popen
from typing import Any, BinaryIO, Literal

from moe_ffn.config.errors import ConfigError, explaining, first_line, printable, show
from moe_ffn.config.files import make_folder, open_file, try_lock, write_atomically
from moe_ffn.config.numbers import format_duration
from moe_ffn.config.option_tree import differences
from moe_ffn.config.trust import FLAG, UntrustedCodeError
from moe_ffn.config.yaml_files import to_yaml
from moe_ffn.runs import folder as run_folder
from moe_ffn.runs.budget import Budget
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.custom_code import comparable_options
from moe_ffn.runs.json_files import Summary
from moe_ffn.studies.config import STUDY_FILE, PlannedRun, StudyConfig
from moe_ffn.training.monitoring.hardware import num_cores

LOGS_FOLDER = "logs"
"""Subfolder of a study with the output of each run's process."""

UNFINISHED_FOLDER = "unfinished"
"""Subfolder of a study with unfinished runs whose options the study has changed since."""

_TAIL_BYTES, _TAIL_LINES = 100_000, 10
_SECONDS_BETWEEN_POLLS = 0.5
_SECONDS_BETWEEN_LINES = 60.0
"""Maximum time without a line while runs are trained."""

State = Literal["waiting", "training", "elsewhere", "finished", "failed"]
"""State of a run; `elsewhere`: another process trains it."""


# -- existing runs


class UnreadableRunError(ConfigError):
    """The options of a run cannot be read; the other runs are still trained."""


def has_begun(config: TrainConfig) -> bool:
    """Return True if the run with these options was started and can be resumed.

    An unfinished run with other options is moved to `UNFINISHED_FOLDER`. Raises ConfigError if another
    process trains it.
    """
    folder = run_folder.named_run_folder(config)
    if not folder.exists():
        return False
    with suppress(UnreadableRunError):  # damaged, or of another version
        if not _differences(folder, config):
            return True
    moved = folder.parent / UNFINISHED_FOLDER / f"{folder.name}-{datetime.now():%Y%m%d-%H%M%S}"
    with run_folder.locked(folder), explaining(f"'{moved}' cannot be written"):
        make_folder(moved.parent)
        folder.rename(moved)
    print(f"{folder.name}: an unfinished run with other options was moved to {moved}")
    return False


def _differences(folder: Path, config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """Return the options, or custom code, that differ from the run in `folder`: name -> (old, new).

    Raises UntrustedCodeError if its options name untrusted code, UnreadableRunError if they cannot be read.
    """
    try:
        saved = run_folder.saved_config(folder)
    except UntrustedCodeError:
        raise
    except ConfigError as error:
        raise UnreadableRunError(first_line(error)) from error
    changes = differences(comparable_options(saved), comparable_options(config))
    # `run.` options differ if the folder was moved; `logging.` options do not affect training.
    return {k: values for k, values in changes.items() if not k.startswith(("run.", "logging."))}


# -- one run


class Job:
    """A run of the study, its state, and the process that trains it."""

    def __init__(self, run: PlannedRun) -> None:
        self.run = run
        self.state: State = "waiting"
        self.problem = ""
        self.seconds = 0.0
        """Duration of the process; set when it has ended."""
        self.first_step = 0
        """Step of the run when this sweep started it."""
        self.flops = Budget.of(run.config).training_flops
        self.process: Popen[bytes] | None = None
        """None before the process starts."""
        self._started_at = 0.0
        self._step = 0

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def log(self) -> Path:
        return self.run.folder.parent / LOGS_FOLDER / f"{self.name}.log"

    def update_state(self) -> None:
        """Set `state` to `finished` if the run is finished; ConfigError if it has other options."""
        folder = self.run.folder
        if not run_folder.is_finished(folder):
            return
        try:
            changes = _differences(folder, self.run.config)
        except UnreadableRunError as error:
            self.fail(str(error))
            return
        for key, (before, now) in changes.items():
            raise ConfigError(
                f"'{folder}' holds a run with other options ({key} was {show(before)}, is {show(now)}); give "
                "the old options, or choose another --name"
            )
        self.state = "finished"

    def fail(self, problem: str) -> None:
        self.state, self.problem = "failed", problem

    def start(self, num_threads: int, trust_code: bool) -> str:
        """Start the process, unless the run is finished or another process trains it.

        Returns `training`, `resuming`, or an empty string. Raises ConfigError if the folder holds another
        run, or a file cannot be written.
        """
        with explaining(f"'{self.log}' cannot be written"):
            make_folder(self.log.parent)
            log = open_file(self.log, "ab")
        with log:
            if not _lock(log) or run_folder.is_training(self.run.folder):
                self.state = "elsewhere"
                return ""
            # Check again under the lock: another process may have trained the run meanwhile.
            self.update_state()
            if self.state in ("finished", "failed"):
                return ""
            is_begun = has_begun(self.run.config)
            self.first_step = self._step = self._last_step() if is_begun else 0
            defaults = {
                "OMP_NUM_THREADS": str(num_threads),
                "WANDB_RUN_GROUP": self.run.folder.parent.name,
            }
            with explaining("its process cannot be started", "give fewer --jobs"):
                self.process = Popen(
                    training_command(self.run, is_begun, trust_code),
                    stdin=DEVNULL,
                    stdout=log,  # the process inherits the lock
                    stderr=STDOUT,
                    env=defaults | os.environ,
                    start_new_session=True,  # Ctrl-C reaches only the sweep, which then stops the process
                )
        self.state, self._started_at = "training", time.monotonic()
        return "resuming" if is_begun else "training"

    def has_ended(self) -> bool:
        """Return True if the process has ended; set `state` if it has."""
        assert self.process is not None
        code = self.process.poll()
        if code is None:
            return False
        self.seconds = time.monotonic() - self._started_at
        self.update_state()
        if self.state == "training":
            how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
            self.fail(f"failed ({how}); its output is in {self.log}")
        return True

    @property
    def max_steps(self) -> int:
        return self.run.config.trainer.max_steps

    @property
    def step(self) -> int:
        """Last optimizer step in the run's log."""
        if self.state == "finished":
            return self.max_steps
        if self.state in ("training", "elsewhere"):
            self._step = max(self._step, self._last_step())
        return self._step

    def _last_step(self) -> int:
        rows = _tail(self.run.folder / run_folder.METRICS_FILE)
        steps = re.findall(rb'^\{"step": (\d{1,10})\b', rows, re.MULTILINE)
        return min(int(steps[-1]), self.max_steps) if steps else 0


def training_command(run: PlannedRun, is_begun: bool, trust_code: bool) -> list[str]:
    """Return the command that trains or resumes a run, with all its options, one flag per section."""
    # Without -P, a folder moe_ffn in the current folder would shadow this package.
    command = [sys.executable, "-P", "-m", "moe_ffn.cli", "train"]
    if is_begun:
        return [*command, "--resume", str(run.folder), *([FLAG] if trust_code else [])]
    options = {key: _yaml_compatible_json(value) for key, value in run.config.to_dict().items()}
    return [*command, *(word for key, value in options.items() for word in (f"--{key}", value))]


def _yaml_compatible_json(value: Any) -> str:
    """Format a value as JSON that is also YAML, which rejects escaped surrogates."""
    return re.sub(
        r"\\u(d[89ab]..)\\u(d[c-f]..)", lambda pair: json.loads(f'"{pair[0]}"'), json.dumps(value)
    )


def _lock(file: BinaryIO) -> bool:
    """Lock a file; return False if another process holds the lock."""
    with suppress(OSError):  # the file system has no locks
        return try_lock(file.fileno())
    return True


def _tail(path: Path) -> bytes:
    """Return the end of a file; empty if it cannot be read."""
    with suppress(OSError), open_file(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES))
        return file.read()
    return b""


# -- all runs


def threads_of_a_run(num_at_once: int) -> int:
    return max(1, num_cores() // num_at_once)


class Sweep:
    """The runs of a study, trained several at a time."""

    def __init__(
        self, runs: Sequence[PlannedRun], num_at_once: int = 1, trust_code: bool = False
    ) -> None:
        """Read the state of all runs; raise ConfigError if a finished run has other options."""
        self.jobs = [Job(run) for run in runs]
        self.num_at_once = num_at_once
        self.trust_code = trust_code
        self.num_threads = threads_of_a_run(num_at_once)
        for job in self.jobs:
            job.update_state()
        self.num_to_train = len(self.jobs_in("waiting"))
        self._num_started = 0
        self._began_at = time.monotonic()

    def jobs_in(self, *states: State) -> list[Job]:
        return [job for job in self.jobs if job.state in states]

    @property
    def is_done(self) -> bool:
        return not self.jobs_in("waiting", "training", "elsewhere")

    @property
    def seconds_left(self) -> float | None:
        """Estimate from the speed of this sweep so far; None before the first step."""
        done = left = 0.0
        for job in self.jobs_in("waiting", "training", "elsewhere"):
            left += job.flops * (1 - job.step / job.max_steps)
        for job in self.jobs:
            if job.state == "training" or job.seconds:
                done += job.flops * (job.step - job.first_step) / job.max_steps
        return (time.monotonic() - self._began_at) / done * left if done else None

    @property
    def progress(self) -> str:
        """Step of each run in training and the time left; empty if this sweep trains none."""
        left = self.seconds_left
        steps = [
            f"{job.name}: step {job.step} of {job.max_steps}" for job in self.jobs_in("training")
        ]
        more = f"; about {format_duration(left)} left" if steps and left is not None else ""
        return f"{', '.join(steps)}{more}"

    def advance(self) -> Iterator[str]:
        """Handle runs that have ended, and start others; yield lines for the user."""
        for job in self.jobs_in("training"):
            if job.has_ended():
                yield from self._ended(job)
        for job in [*self.jobs_in("elsewhere"), *self.jobs_in("waiting")]:
            if len(self.jobs_in("training")) < self.num_at_once:
                yield from self._start(job)

    def _start(self, job: Job) -> Iterator[str]:
        was_elsewhere = job.state == "elsewhere"
        try:
            how = job.start(self.num_threads, self.trust_code)
        except ConfigError as error:
            job.fail(str(error))
        else:
            if how:
                self._num_started += 1
                yield f"{job.name}: {how} ({self._num_started} of {self.num_to_train})"
            elif job.state == "elsewhere" and not was_elsewhere:
                yield f"{job.name}: is being trained by another process; waiting for it"
            elif job.state == "finished":
                yield f"{job.name}: was trained by another process"
        if job.state == "failed":
            yield f"{job.name}: {job.problem}"

    def _ended(self, job: Job) -> Iterator[str]:
        left = self.seconds_left
        num_left = len(self.jobs_in("waiting", "training", "elsewhere"))
        more = f"; {num_left} left" if num_left else ""
        if num_left and left is not None:
            more += f", about {format_duration(left)}"
        if job.state == "finished":
            loss = Summary.read(job.run.folder / run_folder.SUMMARY_FILE).validation_loss
            how = f"{job.seconds:.0f} s" + (f", loss {loss:.4f}" if loss is not None else "")
            yield f"{job.name}: {how}{more}"
        else:
            printed = _tail(job.log).decode(errors="replace").splitlines()
            yield from (f"  {line}" for line in printed[-_TAIL_LINES:])
            yield f"{job.name}: {job.problem}{more}"

    def run(self, say: Callable[[str], None]) -> None:
        """Train all runs, and pass lines for the user to `say`; an exception stops all processes."""
        last_line_at = time.monotonic()
        try:
            while not self.is_done:
                for line in self.advance():
                    say(printable(line))
                    last_line_at = time.monotonic()
                if time.monotonic() - last_line_at > _SECONDS_BETWEEN_LINES and self.progress:
                    say(self.progress)
                    last_line_at = time.monotonic()
                if not self.is_done:
                    time.sleep(_SECONDS_BETWEEN_POLLS)
        except BaseException:
            self.stop()
            raise

    def stop(self) -> None:
        """Let the processes save after their step and exit.

        A KeyboardInterrupt ends them at once; after a second one, this returns without waiting for them.
        """
        processes = [job.process for job in self.jobs_in("training") if job.process]
        for signum in (signal.SIGTERM, signal.SIGINT):
            for process in processes:
                process.send_signal(signum)
            with suppress(KeyboardInterrupt):
                for process in processes:
                    process.wait()
                return


def write_study(study: StudyConfig, folder: Path) -> None:
    """Write the study into the folder of its runs; ConfigError if the file cannot be written."""
    with explaining(f"'{folder / STUDY_FILE}' cannot be written"):
        make_folder(folder)
        write_atomically(folder / STUDY_FILE, to_yaml(study))
