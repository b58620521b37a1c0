"""The folder of one run: made once, never written over; and what a reader may find in it."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path

from moe_ffn.errors import ConfigError, expand_path, reason
from moe_ffn.files import DAMAGED, kind_of, make_folder, open_file, write_whole
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.lock import LOCK_FILE

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
SAVED_FILE = "saved.json"
CHECKPOINTS_FOLDER = "checkpoints"

_LOGS = (METRICS_FILE, ALARMS_FILE, SAMPLES_FILE)
FILES = (
    *(
        CONFIG_FILE,
        FACTS_FILE,
        SUMMARY_FILE,
        TOKENIZER_FILE,
        DOCUMENTS_FILE,
        RESUMES_FILE,
        CODE_FILE,
        SAVED_FILE,
    ),
    *_LOGS,
    *(f"{name}{DAMAGED}" for name in _LOGS),
    *(LOCK_FILE, "sample.txt", "profile.txt", REPORT_FILE),
)
FOLDERS = (CHECKPOINTS_FOLDER, CODE_FOLDER, "wandb")
"""With the files above all that a run makes; what else is in its folder nobody opens."""


def named_run_folder(config: TrainConfig) -> Path:
    """Where a run that has a name is, or would be."""
    assert config.run.name is not None
    return output_dir(config) / config.run.name


def output_dir(config: TrainConfig) -> Path:
    """The folder that holds this run and others; ConfigError where that names none."""
    return expand_path(config.run.output_dir, "run.output_dir")


def check_run_folder(config: TrainConfig) -> None:
    """ConfigError where this run could not be written; makes nothing.

    Asked first, so that a run that cannot be kept costs nobody the preparation of its data.
    """
    folder = parent = output_dir(config)
    with _writing_to(parent):
        if config.run.name is not None and kind_of(parent / config.run.name):
            raise _taken(parent / config.run.name)
        while not folder.exists():
            folder = folder.parent
        if not folder.is_dir():
            raise ConfigError(f"run.output_dir: '{folder}' is a file, not a folder")
        # Only trying tells: root may write anywhere, except where the file system says no.
        with tempfile.TemporaryDirectory(dir=folder):
            pass


def make_run_folder(config: TrainConfig, files: Mapping[str, str]) -> Path:
    """A new folder with `files` in it: the given name, or the FFN type and the time.

    It appears whole; a process that dies before leaves a hidden folder that nobody takes for a run.

    Raises:
        ConfigError: the name is taken, or the folder cannot be written.
    """
    parent = output_dir(config)
    with _writing_to(parent):
        parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".run-", dir=parent) as temporary:
            built = Path(temporary) / "run"
            built.mkdir()
            for name, text in files.items():
                write_file(built, name, text)
            if config.run.name is not None:
                folder = parent / config.run.name
                if not _take(built, folder):
                    raise _taken(folder)
                return folder
            stem = f"{_safe(config.model.ffn.type)}-{datetime.now():%Y%m%d-%H%M%S}"
            return _take_first_free(built, parent, stem)


def _take(built: Path, folder: Path) -> bool:
    """Put `built` in the place of `folder`; whether nobody else was there."""
    if kind_of(folder):
        return False
    try:
        built.rename(folder)
    except OSError:
        if kind_of(folder):  # another process was faster
            return False
        raise
    return True


@contextmanager
def _writing_to(parent: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"run.output_dir: '{parent}' cannot be written ({reason(error)}); "
            "choose another with --run.output_dir"
        ) from error


def check_is_run(folder: Path) -> None:
    """ConfigError where this is no folder of a run, with a hint of what it is."""
    with _reading(folder):
        if not folder.is_dir():
            what = "is a file, not the folder of a run" if folder.exists() else "does not exist"
            raise ConfigError(f"'{folder}' {what}; give the folder of a run, such as runs/my-run")
        check_entries(folder)
        if _is_run(folder):
            return
        inside = sorted(path.name for path in folder.iterdir() if is_run(path))
    raise ConfigError(
        f"'{folder}' is no run: it has no {CONFIG_FILE}; "
        + (
            f"it holds runs; give one of them, such as {folder / inside[0]}"
            if inside
            else "give the folder of a run, such as runs/my-run"
        )
    )


def check_entries(folder: Path) -> None:
    """ConfigError where something else stands in the place of a file of a run, or of a folder.

    A link leads to what is not the run's, and at a pipe one waits. What is in `checkpoints` is judged when it
    is read.
    """
    wanted = {
        **dict.fromkeys((folder / name for name in FOLDERS), "a folder"),
        **dict.fromkeys((folder / name for name in FILES), "a file"),
    }
    with _reading(folder):
        with suppress(FileNotFoundError, NotADirectoryError, PermissionError):
            code = (folder / CODE_FOLDER).glob("*.py")
            wanted |= dict.fromkeys(code, "a file")
        for path, kind in wanted.items():
            if (found := kind_of(path)) not in (None, kind):
                raise ConfigError(
                    f"'{path}' is {found}, and has to be {kind} of the run's own; put back what it was, or "
                    "remove it"
                )


def check_can_be_read(folder: Path, names: Iterable[str] = (*FILES, *FOLDERS)) -> None:
    """ConfigError where the permission lacks to read one of these files and folders of a run."""
    for path in (folder, *(folder / name for name in names)):
        with _reading(path):
            if path.is_dir():
                next(path.iterdir(), None)
            elif path.exists():
                open_file(path).close()


@contextmanager
def _reading(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"'{path}' cannot be read ({reason(error)}); fix its permissions"
        ) from error


def check_has_weights(folder: Path) -> None:
    """ConfigError where no trained model can be read from this folder."""
    check_is_run(folder)
    needed = (CONFIG_FILE, TOKENIZER_FILE, CHECKPOINTS_FOLDER)
    check_can_be_read(folder, needed)
    for name in needed:
        if not (folder / name).exists():
            raise ConfigError(
                f"'{folder}' has no {name}, so no model to load; give a run that has come to its "
                "first validation"
            )


def git_revision() -> str | None:
    """The commit the code is at, with `-dirty` where it was changed; None outside a checkout."""
    try:
        found = subprocess.run(
            ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return found.stdout.strip() or None


def write_file(folder: Path, name: str, text: str) -> None:
    """Put a file into a run's folder, whole; its `name` may begin with that of a folder in it."""
    path = folder / name
    if path.parent != folder:
        make_folder(path.parent)
    write_whole(path, text)


def is_run(path: Path) -> bool:
    """Whether this is the folder of a run, and no link to one; False where that cannot be told."""
    with suppress(OSError):
        return kind_of(path) == "a folder" and _is_run(path)
    return False


def is_finished(folder: Path) -> bool:
    """Whether the run in this folder came to its end."""
    return (folder / SUMMARY_FILE).is_file()


def _is_run(folder: Path) -> bool:
    return any((folder / name).is_file() for name in (CONFIG_FILE, FACTS_FILE, METRICS_FILE))


def _taken(folder: Path) -> ConfigError:
    return ConfigError(
        f"run.name: '{folder}' exists and is never overwritten; choose another name or remove it"
    )


def _take_first_free(built: Path, parent: Path, stem: str) -> Path:
    for attempt in range(1, 1000):
        folder = parent / (stem if attempt == 1 else f"{stem}-{attempt}")
        if _take(built, folder):  # else another run of the same second has it
            return folder
    raise ConfigError(f"run.output_dir: no free name like '{stem}' in '{parent}'")


def _safe(tag: str) -> str:
    """A `type` as part of a folder's name: `my_blocks.py:LowRank` as `LowRank`."""
    return "".join(c if c.isalnum() or c in "-_" else "_" for c in tag.rpartition(":")[2])
