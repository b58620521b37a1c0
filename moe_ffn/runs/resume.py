"""A run that goes on: its folder brought back to where its checkpoint was saved.

Logs are cut, what is damaged is written anew, and a line says what is lost.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_ffn.errors import ConfigError, reason
from moe_ffn.files import read_text, remove_unfinished, set_aside, write_whole
from moe_ffn.runs.config import Resume, TrainConfig, differences
from moe_ffn.runs.documents import CodeEntries, Facts, Saved
from moe_ffn.runs.folder import (
    ALARMS_FILE,
    CHECKPOINTS_FOLDER,
    CODE_FILE,
    CONFIG_FILE,
    DOCUMENTS_FILE,
    FACTS_FILE,
    METRICS_FILE,
    RESUMES_FILE,
    SAMPLES_FILE,
    SAVED_FILE,
    SUMMARY_FILE,
    TOKENIZER_FILE,
    git_revision,
    write_file,
)
from moe_ffn.runs.outside_code import code_files
from moe_ffn.runs.record import CHANGEABLE, RUN_ID, changeable_options
from moe_ffn.runs.start import Start
from moe_ffn.training.monitoring.callbacks import SampleLog, StepLogger, ValidationLogger
from moe_ffn.training.monitoring.json_lines import (
    Line,
    Row,
    Sample,
    cut_lines,
    num_damaged,
    read_lines,
)
from moe_ffn.training.recovery.checkpoint_file import likely_step, newest_first, pass_over


def go_back(resume: Resume, start: Start, files: Mapping[str, str]) -> dict[str, str]:
    """Remove what was written after the checkpoint, and note down that the run goes on.

    What is damaged is written anew, with a line about it.

    Args:
        files: what the run would be begun with now, by name.

    Returns:
        the same, with what is known of its beginning.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = resume.folder
    line: dict[str, Any] = {
        "step": start.step,
        "checkpoint": None if start.checkpoint is None else start.checkpoint.name,
        "passed_over": start.passed_over,
        "changes": {**_changes_since(start, resume.config), **resume.changes},
        "git_revision": git_revision(),
    }
    try:
        remove_unfinished(folder)
        _pass_over_others(folder / CHECKPOINTS_FOLDER, start)
        cut_logs(folder, start.step, start.callbacks)
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
        resumes = read_text(path, "replace") if (path := folder / RESUMES_FILE).exists() else ""
        write_whole(path, f"{resumes}{json.dumps(line)}\n")
        files = repair_files(resume, files)
    except OSError as error:
        raise ConfigError(
            f"'{folder}' cannot be written ({reason(error)}), so the run cannot go on there; make room, or "
            "fix its permissions"
        ) from error
    return files


def _pass_over_others(checkpoints: Path, start: Start) -> None:
    """Rename those of this step and of later ones: read again one day, they would be of another past."""
    for path in newest_first(checkpoints):
        if likely_step(path) >= start.step and path != start.checkpoint:
            pass_over(path)


def _changes_since(start: Start, config: TrainConfig) -> dict[str, tuple[Any, Any]]:
    """The options that are not those with which the checkpoint was made, whoever changed them."""
    made_with = start.made_with.get(CHANGEABLE)
    return {} if made_with is None else differences(made_with, changeable_options(config))


def cut_logs(folder: Path, step: int, callbacks: Mapping[str, Any]) -> None:
    """Remove from metrics, samples and alarms what was written after optimizer step `step`.

    Args:
        callbacks: their states in the checkpoint, which know what has to be there.

    Raises:
        OSError: the folder cannot be written.
    """
    # The validation of that very step may be still to come, and with it a row and a text.
    validated_step = callbacks.get(ValidationLogger.__qualname__, {}).get("last_step", -1)
    metrics, samples, alarms = (folder / n for n in (METRICS_FILE, SAMPLES_FILE, ALARMS_FILE))
    damaged = {
        path
        for path, kind in [(metrics, Row), (samples, Sample), (alarms, Line)]
        if _keep_damaged(path, num_damaged(path, kind))
    }
    cut_lines(metrics, Row, lambda r: r.step <= (validated_step if r.is_of_validation else step))
    cut_lines(samples, Sample, lambda sample: sample.step <= validated_step)
    cut_lines(alarms, Line, lambda alarm: alarm.step <= step)
    for path, what in _lost(folder, callbacks).items():
        if path not in damaged:
            print(f"'{path}' {what}; the rest is lost, and the run goes on", file=sys.stderr)


def _keep_damaged(path: Path, number: int) -> bool:
    """Whether there are lines that nobody can read: they will be left out, and a copy keeps them."""
    if number:
        kept = set_aside(path)
        print(
            f"'{path}' is damaged: {number} of its lines cannot be read and are left out; {kept.name} has "
            "it as it was",
            file=sys.stderr,
        )
    return bool(number)


def _lost(folder: Path, callbacks: Mapping[str, Any]) -> dict[Path, str]:
    """The files that lack what was in them when the checkpoint was made, and how that is known."""
    metrics, alarms, samples = (folder / n for n in (METRICS_FILE, ALARMS_FILE, SAMPLES_FILE))
    steps = callbacks.get(StepLogger.__qualname__, {})
    text = callbacks.get(SampleLog.__qualname__, {}).get("last")
    lost: dict[Path, str] = {}
    last_step = max((row.step for row in read_lines(metrics, Row)), default=0)
    if last_step < (expected := steps.get("last_row_step", 0)):
        lost[metrics] = f"ends at step {last_step}, not {expected}"
    number = sum(1 for _ in read_lines(alarms, Line))
    if number < (expected := steps.get("num_alarms", 0)):
        lost[alarms] = f"has {number} alarms, not {expected}"
    if text and text not in [line.text for line in read_lines(samples, Sample)][-1:]:
        lost[samples] = "does not end with the newest text"
    return lost


def repair_files(resume: Resume, files: Mapping[str, str]) -> dict[str, str]:
    """The files that a run is begun with, as they have to be; written where they are not, with a line."""
    facts = _facts_now(resume, files[FACTS_FILE])
    repaired = {
        **files,
        FACTS_FILE: facts,
        **code_files(resume.config, CodeEntries.read(resume.folder / CODE_FILE).entries),
    }
    for name, text in repaired.items():
        path = resume.folder / name
        found = _text(path)
        if found == text or (name == CONFIG_FILE and not resume.changes):
            continue
        if (
            name in (TOKENIZER_FILE, DOCUMENTS_FILE)
            or (name == FACTS_FILE and not Facts.read(path).is_whole)
            or (name == SAVED_FILE and not Saved.read(path).is_whole)
            or (name == CODE_FILE and not CodeEntries.parse(found).entries)
        ):
            what = "is not what this run was begun with" if found else "is missing or empty"
            print(f"'{path}' {what}; it is written anew", file=sys.stderr)
        write_file(resume.folder, name, text)
    return repaired


def _text(path: Path) -> str:
    try:
        return read_text(path, errors="replace")
    except FileNotFoundError:
        return ""


def _facts_now(resume: Resume, fresh: str) -> str:
    """What was known of the run when it began, with the options that it has now."""
    path = resume.folder / FACTS_FILE
    facts, options = Facts.read(path), resume.config.to_dict()
    if not facts.is_whole:
        return fresh
    known = facts.model_dump(exclude_unset=True)
    fresh_facts = json.loads(fresh)
    now = {key: value for key, value in fresh_facts.items() if key in options}
    different = differences({key: known.get(key) for key in now}, now)
    for key, (before, after) in different.items():
        if key in resume.changes:
            continue
        print(
            f"'{resume.folder / CONFIG_FILE}' has {key} {after}, {FACTS_FILE} has {before}: one of them was "
            f"edited or damaged; going on with {after}",
            file=sys.stderr,
        )
    if RUN_ID in fresh_facts:
        now[RUN_ID] = fresh_facts[RUN_ID]
    return json.dumps({**known, **now}, indent=2) + "\n"
