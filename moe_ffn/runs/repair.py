"""The files of a run that goes on: cut back to its checkpoint, and repaired where they are damaged.

A line for each file says what is lost.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_ffn.files import read_text, set_aside
from moe_ffn.runs.documents import CodeEntries, Facts, Saved
from moe_ffn.runs.folder import (
    ALARMS_FILE,
    CODE_FILE,
    CONFIG_FILE,
    DOCUMENTS_FILE,
    FACTS_FILE,
    METRICS_FILE,
    SAMPLES_FILE,
    SAVED_FILE,
    TOKENIZER_FILE,
    write_file,
)
from moe_ffn.runs.outside_code import code_files
from moe_ffn.runs.record import RUN_ID, differences
from moe_ffn.runs.resume import Resume
from moe_ffn.training.monitoring.callbacks import StepLogger, ValidationLogger
from moe_ffn.training.monitoring.json_lines import (
    Line,
    Row,
    Sample,
    cut_lines,
    num_damaged,
    read_lines,
)
from moe_ffn.training.monitoring.sample_log import SampleLog


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
    mended = {
        **files,
        FACTS_FILE: facts,
        **code_files(resume.config, CodeEntries.read(resume.folder / CODE_FILE).entries),
    }
    for name, text in mended.items():
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
    return mended


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
