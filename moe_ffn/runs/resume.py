"""A run that goes on: from the newest of its checkpoints that is good, its folder brought back to that step.

Logs are cut, what is damaged is written anew, and a line says what is lost.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_ffn.config.errors import ConfigError, command
from moe_ffn.data.prepare import PreparedData
from moe_ffn.files import (
    read_text,
    reason,
    remove_unfinished,
    set_aside,
    write_file,
    write_whole,
)
from moe_ffn.runs.assemble import make_callbacks
from moe_ffn.runs.checkpoint_checks import require_training
from moe_ffn.runs.checkpoints import best_checkpoint, newest_good, refusal_of_weights
from moe_ffn.runs.config import Resume, TrainConfig, differences
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
)
from moe_ffn.runs.json_files import CodeEntries, Facts, Saved
from moe_ffn.runs.outside_code import code_files
from moe_ffn.runs.record import (
    CHANGEABLE,
    PRECISION,
    RUN_ID,
    RunRecord,
    changeable_options,
    identity,
)
from moe_ffn.training.config import PRECISIONS
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.monitoring.json_lines import (
    AnyLine,
    Line,
    Row,
    Sample,
    cut_lines,
    num_damaged,
    read_lines,
)
from moe_ffn.training.recovery.checkpoint_file import (
    IDENTITY,
    newest_first,
    set_skipped_aside,
    step_name,
    step_of,
)
from moe_ffn.training.recovery.checkpoint_keeper import CheckpointKeeper

# -- where it goes on


@dataclass(frozen=True)
class Start:
    """Where a run goes on."""

    step: int
    checkpoint: Path | None
    """The file; None where none was saved yet, to go on from the first step."""
    passed_over: tuple[str, ...]
    callbacks: Mapping[str, Any]
    """The states of the callbacks, by their names."""
    run_id: str | None = None
    """The run's id; None where it is lost."""
    made_with: Mapping[str, Any] = field(default_factory=dict)
    """The identity in the checkpoint."""

    @property
    def saved_step(self) -> int | None:
        return None if self.checkpoint is None else self.step

    def require_steps_left(self, max_steps: int) -> None:
        """ConfigError where the run has come further than it is to go."""
        if self.step > max_steps:
            raise ConfigError(
                f"trainer.max_steps ({max_steps}): the run is at step {self.step} already; give at least that"
            )

    def describe(self, folder: Path) -> str:
        """Which checkpoint, and why this one."""
        if self.checkpoint is None:
            return f"resuming {folder} from the start: no checkpoint was saved before it ended"
        name, why = self.checkpoint.name, "; ".join(self.passed_over)
        which = (
            f"passed over, since {why}; the newest good one"
            if why
            else "its newest checkpoint, and good"
        )
        return f"resuming {folder} after step {self.step}, from {name}: {which}"


def find_start(folder: Path, own: TrainConfig, data: PreparedData, module: LanguageModel) -> Start:
    """The newest checkpoint that is whole and of this very run.

    Args:
        folder: of the run.
        own: the options in it.
        module: of the run, as it begins, which the checkpoint has to fit.

    Raises:
        ConfigError: there are checkpoints, and none is good; or there are none, and there were.
    """
    checkpoints, record = folder / CHECKPOINTS_FOLDER, RunRecord.read(folder, own)
    candidates = newest_first(checkpoints)
    refusal = refusal_to_start(folder, own, data, module, record)
    found, passed_over = newest_good(candidates, refusal)
    if found is not None:
        if lost := _lost_checkpoint(record, found.step, candidates):
            passed_over.insert(0, f"{lost} is missing")
        made_with, callbacks = found.values[IDENTITY], found.values["callbacks"]
        passed = tuple(passed_over)
        return Start(found.step, found.path, passed, callbacks, made_with[RUN_ID], made_with)
    if passed_over:
        more = f"; and {len(passed_over) - 1} more" if len(passed_over) > 1 else ""
        raise ConfigError(
            f"'{checkpoints}' has no checkpoint to go on from: {passed_over[0]}{more}; put back what was "
            "there, or start a new run"
        )
    _require_that_none_was_saved(folder, own, record)
    return Start(0, None, (), {}, record.run_id)


def refusal_to_start(
    folder: Path, own: TrainConfig, data: PreparedData, module: LanguageModel, record: RunRecord
) -> Callable[[Mapping[str, Any]], str | None]:
    """A function of the values in a checkpoint: why a run cannot go on from it, or None where it can.

    It raises a CheckpointError where they are malformed.
    """
    whose, made = identity(own, data), make_callbacks(own, data, folder)
    callbacks = (made.samples, made.steps, made.validation, made.checkpoints)

    def refusal(values: Mapping[str, Any]) -> str | None:
        why = refusal_of_weights(values, whose, module) or record.refusal(values[IDENTITY])
        if why is None:
            require_training(values, module, callbacks, own.trainer.accumulate_grad_batches)
        return why

    return refusal


def _lost_checkpoint(record: RunRecord, step: int, candidates: Sequence[Path]) -> str:
    """The name of the checkpoint that was saved last, where it is later than `step` and not there."""
    saved = None if record.saved is None else record.saved.last_saved_step
    if saved is None or saved <= step or any(step_of(path) >= saved for path in candidates):
        return ""
    return step_name(saved)


def _require_that_none_was_saved(folder: Path, own: TrainConfig, record: RunRecord) -> None:
    """ConfigError where a run without a checkpoint had one: as it wrote down itself, or by its rows."""
    saved, checkpoints = record.saved, folder / CHECKPOINTS_FOLDER
    if saved is not None and saved.last_saved_step is not None:
        why = f"though {SAVED_FILE} says that {step_name(saved.last_saved_step)} was saved; put it back"
    elif saved is None and _has_come_to_a_save(folder, own):
        why = (
            f"though the run came further than its first, and {SAVED_FILE}, which says whether that was "
            "saved, is missing or damaged; put them back"
        )
    else:
        return
    best = best_checkpoint(checkpoints)
    but = f" ({best[0].name} holds weights alone)" if best else ""
    raise ConfigError(
        f"'{checkpoints}' has no checkpoint to go on from{but}, {why}, or start a new run"
    )


def _has_come_to_a_save(folder: Path, own: TrainConfig) -> bool:
    first_saved = own.checkpoints.every_n_steps or own.trainer.validate_every_n_steps
    rows = read_lines(folder / METRICS_FILE, Row)
    return (folder / SUMMARY_FILE).exists() or any(row.step > first_saved for row in rows)


def first_precision(folder: Path, start: Start, precision: str) -> str:
    """What `auto` or `fastest` was resolved to when the run began; `precision` where that is lost."""
    known = [Facts.read(folder / FACTS_FILE).precision, start.made_with.get(PRECISION)]
    return next((str(name) for name in PRECISIONS if name in known), precision)


def how_to_go_on(folder: Path, keeper: CheckpointKeeper) -> str:
    """The command that goes on, and the checkpoint it will begin from."""
    step = keeper.last_saved_step
    saved = "no checkpoint was saved" if step < 0 else f"saved {step_name(step)}"
    return f"{saved}; go on with: {command('train')} --resume {folder}"


# -- the folder brought back


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
    folder, made_with = resume.folder, start.made_with.get(CHANGEABLE)
    now = changeable_options(resume.config)
    since = {} if made_with is None else differences(made_with, now)
    line: dict[str, Any] = {
        "step": start.step,
        "checkpoint": None if start.checkpoint is None else start.checkpoint.name,
        "passed_over": start.passed_over,
        "changes": {**since, **resume.changes},
        "git_revision": git_revision(),
    }
    try:
        remove_unfinished(folder)
        set_skipped_aside(folder / CHECKPOINTS_FOLDER, start.step)
        _cut_logs(folder, start.step, start.callbacks)
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
        write_whole(folder / RESUMES_FILE, f"{_text(folder / RESUMES_FILE)}{json.dumps(line)}\n")
        return _repair_files(resume, files)
    except OSError as error:
        raise ConfigError(
            f"'{folder}' cannot be written ({reason(error)}), so the run cannot go on there; make room, or "
            "fix its permissions"
        ) from error


def _cut_logs(folder: Path, step: int, callbacks: Mapping[str, Any]) -> None:
    """Remove from metrics, samples and alarms what was written after optimizer step `step`.

    Args:
        callbacks: their states in the checkpoint, which know what has to be there.
    """
    steps, text = callbacks.get("StepLogger", {}), callbacks.get("SampleLog", {}).get("last")
    # The validation of that very step may be still to come, and with it a row and a text.
    validated = callbacks.get("ValidationLogger", {}).get("last_step", -1)
    rows = _cut(
        folder / METRICS_FILE,
        Row,
        lambda row: row.step <= (validated if row.is_of_validation else step),
    )
    samples = _cut(folder / SAMPLES_FILE, Sample, lambda sample: sample.step <= validated)
    alarms = _cut(folder / ALARMS_FILE, Line, lambda alarm: alarm.step <= step)
    lost: dict[str, str] = {}
    last, expected = max((row.step for row in rows or ()), default=0), steps.get("last_row_step", 0)
    if rows is not None and last < expected:
        lost[METRICS_FILE] = f"ends at step {last}, not {expected}"
    if samples is not None and text and text not in [sample.text for sample in samples[-1:]]:
        lost[SAMPLES_FILE] = "does not end with the newest text"
    expected = steps.get("alarm_log", {}).get("num_alarms", 0)
    if alarms is not None and len(alarms) < expected:
        lost[ALARMS_FILE] = f"has {len(alarms)} alarms, not {expected}"
    for name, what in lost.items():
        print(f"'{folder / name}' {what}; the rest is lost, and the run goes on", file=sys.stderr)


def _cut(
    path: Path, kind: type[AnyLine], is_kept: Callable[[AnyLine], bool]
) -> list[AnyLine] | None:
    """Keep some lines of a log; returns them, or None where it was damaged, which a line says."""
    number = num_damaged(path, kind)
    if number:
        kept = set_aside(path)
        print(
            f"'{path}' is damaged: {number} of its lines cannot be read and are left out; {kept.name} has "
            "it as it was",
            file=sys.stderr,
        )
    cut_lines(path, kind, is_kept)
    return None if number else list(read_lines(path, kind))


def _repair_files(resume: Resume, files: Mapping[str, str]) -> dict[str, str]:
    """The files that a run is begun with, as they have to be; written where they are not, with a line."""
    entries = CodeEntries.read(resume.folder / CODE_FILE).entries
    facts = _facts_now(resume, files[FACTS_FILE])
    repaired = {**files, FACTS_FILE: facts, **code_files(resume.config, entries)}
    for name, text in repaired.items():
        path = resume.folder / name
        found = _text(path)
        if found == text or (name == CONFIG_FILE and not resume.changes):
            continue
        if (
            name in (TOKENIZER_FILE, DOCUMENTS_FILE)
            or (name == FACTS_FILE and not Facts.read(path).is_whole)
            or (name == SAVED_FILE and not Saved.read(path).is_whole)
            or (name == CODE_FILE and not entries)
        ):
            what = "is not what this run was begun with" if found else "is missing or empty"
            print(f"'{path}' {what}; it is written anew", file=sys.stderr)
        write_file(resume.folder, name, text)
    return repaired


def _text(path: Path) -> str:
    """Empty where there is no file."""
    return read_text(path, errors="replace") if path.exists() else ""


def _facts_now(resume: Resume, fresh: str) -> str:
    """What was known of the run when it began, with the options and the id that it has now."""
    facts = Facts.read(resume.folder / FACTS_FILE)
    if not facts.is_whole:
        return fresh
    known, options = facts.model_dump(exclude_unset=True), resume.config.to_dict()
    now = {key: value for key, value in json.loads(fresh).items() if key in {*options, RUN_ID}}
    before = {key: known.get(key) for key in now if key in options}
    for key, (old, new) in differences(before, {key: now[key] for key in before}).items():
        if key not in resume.changes:
            print(
                f"'{resume.folder / CONFIG_FILE}' has {key} {new}, {FACTS_FILE} has {old}: one of them was "
                f"edited or damaged; going on with {new}",
                file=sys.stderr,
            )
    return json.dumps({**known, **now}, indent=2) + "\n"
