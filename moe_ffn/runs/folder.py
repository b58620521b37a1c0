"""The folder of a run, which is never overwritten, and to which only one process writes at a time."""

from __future__ import annotations

import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from functools import cache
from itertools import chain, count
from pathlib import Path
from typing import Any

from moe_ffn.config.errors import ConfigError, command, expand_path, explaining, is_clone, reading
from moe_ffn.config.files import kind_of, open_file, read_object, try_lock, write_file
from moe_ffn.config.option_tree import differences, flatten, show_value
from moe_ffn.config.yaml_files import read_config, read_yaml
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.json_files import Facts

log = logging.getLogger(__name__)

CONFIG_FILE = "config.yaml"
FACTS_FILE = "facts.json"
METRICS_FILE = "metrics.jsonl"
SUMMARY_FILE = "summary.json"
ALARMS_FILE = "alarms.jsonl"
SAMPLES_FILE = "samples.jsonl"
TOKENIZER_FILE = "tokenizer.json"
DOCUMENTS_FILE = "documents.json"
RESUMES_FILE = "resumes.jsonl"
CODE_FILE = "code.json"
CODE_FOLDER = "code"
REPORT_FILE = "report.html"
CHECKPOINTS_FOLDER = "checkpoints"
MODEL_FOLDER = "model"

LOCK_FILE = ".lock"
"""File with the name of the machine on which the run was trained last."""

_LOCK_TIMEOUT_SECONDS = 1.0
"""Seconds to wait for a lock, since a reader that tests the lock holds it briefly."""

# -- a new folder


def named_run_folder(config: TrainConfig) -> Path:
    """Return the folder of a run that has a name."""
    assert config.run.name is not None
    return output_dir(config) / config.run.name


def output_dir(config: TrainConfig) -> Path:
    """Return the folder that contains the runs; ConfigError if the option is no path."""
    return expand_path(config.run.output_dir, "run.output_dir")


def check_run_folder(config: TrainConfig) -> None:
    """Raise ConfigError if the folder of this run cannot be created; called before data are prepared."""
    folder = parent = output_dir(config)
    with explaining(
        f"run.output_dir: '{parent}' cannot be written", "choose another with --run.output_dir"
    ):
        if config.run.name is not None and kind_of(parent / config.run.name):
            raise _taken(parent / config.run.name)
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise ConfigError(f"run.output_dir: '{folder}' is a file, not a folder")
        # Try to write: permission bits do not bind root, and do not show a read-only disk.
        with tempfile.TemporaryDirectory(prefix=".run-", dir=folder):
            pass


def make_run_folder(config: TrainConfig, files: Mapping[str, str]) -> Path:
    """Make the folder of a new run, named by `run.name` or by the FFN type and the time, and write `files`.

    The folder appears atomically; a process that dies earlier leaves only a hidden folder. Raises ConfigError
    if the name is taken, or the folder cannot be written.
    """
    parent = output_dir(config)
    with explaining(
        f"run.output_dir: '{parent}' cannot be written", "choose another with --run.output_dir"
    ):
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".run-", dir=parent) as temporary:
            built = Path(temporary) / "run"
            built.mkdir()
            for name, text in files.items():
                write_file(built, name, text)
            block = re.sub(r"[^\w-]", "_", config.model.ffn.type.rpartition(":")[2])
            stem = f"{block}-{datetime.now():%Y%m%d-%H%M%S}"
            free_names = chain([stem], (f"{stem}-{number}" for number in count(2)))
            for name in [config.run.name] if config.run.name else free_names:
                folder = parent / name
                try:
                    if kind_of(folder) is None:
                        return built.rename(folder)
                except OSError:
                    if kind_of(folder) is None:  # otherwise another process took the name
                        raise
    raise _taken(parent / (config.run.name or stem))


def _taken(folder: Path) -> ConfigError:
    return ConfigError(
        f"run.name: '{folder}' exists and is never overwritten; choose another name or remove it"
    )


def git_revision() -> str | None:
    """Return the git commit of the code, with `-dirty` if files have changed; None outside a checkout."""
    if not is_clone():  # git would name the commit of a project whose .venv holds this package
        return None
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    options: Any = {"capture_output": True, "text": True, "timeout": 10, "check": True}
    try:
        done = subprocess.run(command, cwd=Path(__file__).parent, **options)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip() or None


# -- an existing folder


def is_run(path: Path) -> bool:
    """Return True if `path` is the folder of a run; false if it cannot be read."""
    with suppress(OSError):
        return kind_of(path) == "a folder" and _is_run(path)
    return False


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG_FILE, FACTS_FILE, METRICS_FILE))


def is_finished(folder: Path) -> bool:
    return (folder / SUMMARY_FILE).is_file()


def check_is_run(folder: Path, wanted: str = "a run, such as runs/my-run") -> None:
    """Raise ConfigError, with a hint, if `folder` is not the folder of a run."""
    with reading(folder):
        if not folder.is_dir():
            problem = "is a file, not the folder of a run" if folder.exists() else "does not exist"
            raise ConfigError(f"'{folder}' {problem}; give the folder of {wanted}")
        if _is_run(folder):
            return
        runs = sorted(path.name for path in folder.iterdir() if is_run(path))
    hint = model_folder_hint(folder) or f"give the folder of {wanted}"
    if runs:
        hint = f"it holds runs; give one of them, such as {folder / runs[0]}"
    raise ConfigError(f"'{folder}' is not a run: it has no {CONFIG_FILE}; {hint}")


def model_folder_hint(folder: Path) -> str:
    """Return a hint on how to read a model folder, as the end of a sentence; empty for another folder."""
    path = folder / "config.json"
    if (config := read_object(path)) is None:
        return f"its {path.name} is damaged; copy it again" if path.is_file() else ""
    model_type = config.get("model_type")
    if model_type == "moe_ffn":
        return "it is the folder of a model, which moe_ffn.load_pretrained reads"
    convert = f"{command('convert', folder, 'NEW')} makes a model folder of it"
    return "" if model_type is None else f"it is a model of transformers: {convert}"


def check_has_weights(folder: Path) -> None:
    """Raise ConfigError if no trained model can be read from this folder."""
    check_is_run(folder)
    for name in (CONFIG_FILE, TOKENIZER_FILE, CHECKPOINTS_FOLDER):
        path = folder / name
        if not path.exists():
            if path.is_symlink():
                raise ConfigError(
                    f"'{path}' is a link to '{path.readlink()}', which does not exist; mount its disk, or "
                    "restore it"
                )
            raise ConfigError(
                f"'{folder}' has no {name}, so no model to load; give a run that has reached its "
                "first validation"
            )


def saved_config(folder: Path) -> TrainConfig:
    """Read the options of a run; those that are newer than the run take their defaults.

    `facts.json` holds the same options, which distinguishes an older run from a truncated `config.yaml`.
    Raises ConfigError if the file cannot be read, was cut short, or names code that is not trusted.
    """
    path = folder / CONFIG_FILE
    config = read_config(path, TrainConfig)
    in_file = read_yaml(path, where=f"'{path}'")
    facts = Facts.read(folder / FACTS_FILE)

    def missing(options: Mapping[str, Any]) -> dict[str, Any]:
        found = differences(in_file, options).items()
        return {key: value for key, (saved, value) in found if saved is None}

    added = missing(config.to_dict())
    had = missing(facts.model_extra or {}) if facts.is_whole else added
    if lost := [key for key in added if key in had]:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        older = "" if facts.is_whole else f" or is from an older version without its {FACTS_FILE}"
        raise ConfigError(
            f"'{path}' lacks {lost[0]}{more}, so it was cut short{older}; restore the original file"
        )
    began, now = flatten(facts.model_extra or {}), flatten(in_file)
    for key, before in began.items():
        if now.get(key, before) != before:
            change = f"{key} is {show_value(now[key])} (was {show_value(before)})"
            _log_once(f"'{path}' was edited: {change}")
    if added:
        values = ", ".join(f"{key} {show_value(value)}" for key, value in added.items())
        _log_once(f"'{path}' is older than these options, which take their defaults: {values}")
    return config


@cache
def _log_once(message: str) -> None:
    log.info("%s", message)


# -- the lock


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Lock a run's folder until the block or the process ends; ConfigError if another process holds the lock.

    This locks the folder itself, which users do not delete by mistake, and a file in it, since NFS locks only
    files. On a file system without locks it does nothing.
    """
    with ExitStack() as stack:
        with suppress(OSError):
            _take_lock(stack.enter_context(_opened(folder)), folder)
        with suppress(OSError):  # the lock file cannot be written
            file = stack.enter_context(open_file(folder / LOCK_FILE, "ab")).fileno()
            _take_lock(file, folder)
            os.truncate(file, 0)
            os.write(file, platform.node().encode())
        yield


def is_training(folder: Path) -> bool | None:
    """Return True if a process is training this run; None if this machine cannot tell."""
    with suppress(OSError), _opened(folder) as descriptor:
        if _is_locked(descriptor):
            return True
    with suppress(OSError), open_file(folder / LOCK_FILE) as file:
        if _is_locked(file.fileno()):
            return True
        if sys.platform != "win32" and file.read() == platform.node().encode():
            return False
    return None


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _take_lock(descriptor: int, folder: Path) -> None:
    """Take a lock; ConfigError if another process holds it, OSError if the file system has no locks."""
    deadline = time.monotonic() + _LOCK_TIMEOUT_SECONDS
    while not try_lock(descriptor):
        if time.monotonic() > deadline:
            raise ConfigError(
                f"'{folder}' is being trained by another process; stop that one, or start a new run"
            )
        time.sleep(0.05)


def _is_locked(descriptor: int) -> bool:
    with suppress(OSError):
        return not try_lock(descriptor, shared=True)
    return False
