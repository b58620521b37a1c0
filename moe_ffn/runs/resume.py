"""Resuming a run: find its newest good checkpoint, and cut its folder back to that step."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ffn.config.errors import ConfigError, command
from moe_ffn.data.prepare import PreparedData
from moe_ffn.files import (
    read_text,
    reason,
    remove_unfinished,
    write_file,
    write_whole,
)
from moe_ffn.runs.assemble import make_callbacks
from moe_ffn.runs.checkpoints import (
    newest_good,
    refusal_of_weights,
)
from moe_ffn.runs.config import Resume, TrainConfig
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
    SUMMARY_FILE,
    TOKENIZER_FILE,
    git_revision,
    reading,
)
from moe_ffn.runs.identity import RUN_ID, checkpoint_identity
from moe_ffn.runs.json_files import CodeEntries, Facts
from moe_ffn.runs.outside_code import code_files
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.monitoring.json_lines import (
    AnyLine,
    Line,
    Row,
    Sample,
    cut_lines,
    num_damaged,
)
from moe_ffn.training.recovery.checkpoint_file import (
    IDENTITY,
    newest_first,
    set_skipped_aside,
    step_name,
)
from moe_ffn.training.recovery.checkpoint_keeper import CheckpointKeeper
from moe_ffn.training.recovery.guard import StepGuard

log = logging.getLogger(__name__)

# -- the resume point


@dataclass(frozen=True)
class Start:
    """The point that a run is resumed from."""

    step: int = 0
    checkpoint: Path | None = None
    """File of the checkpoint; None before the first save, to resume from the first step."""
    run_id: str | None = None
    """Id of the run; None where its files are lost."""
    validated_step: int = -1
    """Step of the last validation before the checkpoint: that of its own step may be still to come."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that are not good, each with the reason."""

    def describe(self, folder: Path) -> str:
        if self.checkpoint is None:
            return f"resuming {folder} from the start: it has no checkpoint"
        why = f"; skipped, since {'; '.join(self.skipped)}" if self.skipped else ""
        return f"resuming {folder} after step {self.step}, from {self.checkpoint.name}{why}"


def find_start(
    folder: Path, own: TrainConfig, data: PreparedData, module: LanguageModel, max_steps: int
) -> Start:
    """Return the newest checkpoint that is intact and belongs to this run.

    Args:
        own: the options in the folder.
        module: of the run, as it begins; its weights have the names and shapes of the checkpoint's.
        max_steps: the run's new number of steps.

    Raises:
        ConfigError: there are checkpoints, and none is good; or the run has passed `max_steps`.
    """
    checkpoints, run_id = (
        folder / CHECKPOINTS_FOLDER,
        Facts.read(folder / FACTS_FILE).run_id or None,
    )
    expected = checkpoint_identity(own, data, run_id)

    def refusal(values: Mapping[str, Any]) -> str | None:
        refused = refusal_of_weights(values, expected, module)
        return refused or _refusal_of_state(values, own, data, folder)

    with reading(checkpoints):
        found, skipped = newest_good(newest_first(checkpoints), refusal)
    if found is None:
        if skipped:
            more = f"; and {len(skipped) - 1} more" if len(skipped) > 1 else ""
            raise ConfigError(
                f"'{checkpoints}' has no checkpoint to resume from: {skipped[0]}{more}; put back what was "
                "there, or start a new run"
            )
        return Start(run_id=run_id)
    if found.step > max_steps:
        raise ConfigError(
            f"trainer.max_steps ({max_steps}): the run is at step {found.step} already; give at least that"
        )
    return Start(
        found.step,
        found.path,
        found.values[IDENTITY].get(RUN_ID),
        found.values["callbacks"]["ValidationLogger"]["last_step"],
        tuple(skipped),
    )


def _refusal_of_state(
    values: Mapping[str, Any], own: TrainConfig, data: PreparedData, folder: Path
) -> str | None:
    """Return why training cannot resume from a state: fresh copies of what is saved try to load it."""
    for name in ("global_step", "loops", "optimizer_states", "lr_schedulers", "guard", "callbacks"):
        if name not in values:
            return f"lacks '{name}', so no run can be resumed from it"
    made = make_callbacks(own, data, folder)
    saved = {callback.state_key: callback for callback in made.saved}
    try:
        StepGuard(own.trainer.guard).load_state_dict(values["guard"])
        for name, callback in saved.items():
            callback.load_state_dict(values["callbacks"][name])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"holds a state that this version cannot load ({error!r})"
    return None


def resume_hint(folder: Path, keeper: CheckpointKeeper) -> str:
    """Return the command that resumes a run, and the checkpoint that it begins from."""
    step = keeper.last_saved_step
    saved = "no checkpoint was saved" if step < 0 else f"saved {step_name(step)}"
    return f"{saved}; resume with: {command('train')} --resume {folder}"


# -- the folder


def rewind(resume: Resume, start: Start, files: Mapping[str, str]) -> None:
    """Remove what was written after the checkpoint, and record that the run is resumed.

    Args:
        files: the files that a new run would begin with, name -> text. Those that are missing, damaged, or
            have other options now are written.

    Raises:
        ConfigError: the folder cannot be written.
    """
    folder = resume.folder
    line = {
        "step": start.step,
        "checkpoint": None if start.checkpoint is None else start.checkpoint.name,
        "skipped": start.skipped,
        "changes": resume.changes,
        "git_revision": git_revision(),
    }
    try:
        remove_unfinished(folder)
        set_skipped_aside(folder / CHECKPOINTS_FOLDER, start.step)
        _cut(folder / METRICS_FILE, Row, lambda row: row.step <= _last_step(row, start))
        _cut(folder / SAMPLES_FILE, Sample, lambda sample: sample.step <= start.validated_step)
        _cut(folder / ALARMS_FILE, Line, lambda alarm: alarm.step <= start.step)
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
        write_whole(folder / RESUMES_FILE, f"{_text(folder / RESUMES_FILE)}{json.dumps(line)}\n")
        _update_files(resume, files)
    except OSError as error:
        raise ConfigError(
            f"'{folder}' cannot be written ({reason(error)}), so the run cannot be resumed there; make room, "
            "or fix its permissions"
        ) from error


def _last_step(row: Row, start: Start) -> int:
    return start.validated_step if row.is_of_validation else start.step


def _cut(path: Path, kind: type[AnyLine], is_kept: Callable[[AnyLine], bool]) -> None:
    """Keep some lines of a log, without those that are damaged."""
    if number := num_damaged(path, kind):
        log.warning(
            "'%s' is damaged: %d of its lines cannot be read and are left out", path, number
        )
    cut_lines(path, kind, is_kept)


def _update_files(resume: Resume, files: Mapping[str, str]) -> None:
    entries = CodeEntries.read(resume.folder / CODE_FILE).entries
    facts = _facts_now(resume, files[FACTS_FILE])
    updated = {**files, FACTS_FILE: facts, **code_files(resume.config, entries)}
    for name, text in updated.items():
        path = resume.folder / name
        if _text(path) == text or (name == CONFIG_FILE and not resume.changes):
            continue
        is_lost = name == FACTS_FILE and not Facts.read(path).is_whole
        if is_lost or name in (TOKENIZER_FILE, DOCUMENTS_FILE):
            log.warning("'%s' is missing or damaged; it is recreated", path)
        write_file(resume.folder, name, text)


def _facts_now(resume: Resume, fresh: str) -> str:
    """Return the facts of the run's beginning, with the options and the id of now."""
    facts = Facts.read(resume.folder / FACTS_FILE)
    if not facts.is_whole:
        return fresh
    options = {*resume.config.to_dict(), RUN_ID}
    now = {key: value for key, value in json.loads(fresh).items() if key in options}
    return json.dumps({**facts.model_dump(exclude_unset=True), **now}, indent=2) + "\n"


def _text(path: Path) -> str:
    """Return the text of a file; empty if there is none."""
    return read_text(path, errors="replace") if path.exists() else ""
