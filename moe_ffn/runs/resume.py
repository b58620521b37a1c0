"""Resuming a run: find its newest intact checkpoint, and remove the lines logged after that step.

Programs that only read weights use this module too, so it does not import lightning at the top.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from moe_ffn.config.errors import ConfigError, printable, reading
from moe_ffn.config.files import read_text, reason, remove_unfinished, write_atomically, write_file
from moe_ffn.config.option_tree import differences, flatten
from moe_ffn.data.prepare import PreparedData
from moe_ffn.runs.config import Resume, TrainConfig
from moe_ffn.runs.custom_code import code_files
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
    is_finished,
)
from moe_ffn.runs.identity import RUN_ID, checkpoint_identity
from moe_ffn.runs.json_files import CodeEntries, Facts
from moe_ffn.training.config import TrainerConfig
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
    CheckpointError,
    newest_first,
    read_checkpoint,
    rename_skipped,
)
from moe_ffn.training.recovery.guard import StepGuard

log = logging.getLogger(__name__)

# -- the newest intact checkpoint

UsableCheckpoint = tuple[Path, Mapping[str, Any]]
"""Path and values of an intact checkpoint that belongs to the run."""


def first_usable(
    candidates: Iterable[Path], problem_of: Callable[[Mapping[str, Any]], str | None]
) -> tuple[UsableCheckpoint | None, list[str]]:
    """Return the first intact checkpoint for which `problem_of` returns None, or None.

    The second value lists the problems of the checkpoints before it, such as `step_00000012.ckpt is empty`.
    """
    skipped: list[str] = []
    for path in candidates:
        try:
            values = read_checkpoint(path)
            problem = problem_of(values)
            if problem is None:
                return (path, values), skipped
        except CheckpointError as error:
            problem = str(error)
        skipped.append(printable(f"{path.name} {problem}"))
    return None, skipped


def problem_of_weights(
    values: Mapping[str, Any], expected: Mapping[str, Any], model: nn.Module
) -> str | None:
    """Return the reason why `model` cannot load the weights of a checkpoint; None if it can.

    `expected` is a `checkpoint_identity` or an `identity_of_weights`; only its keys are compared.
    """
    weights, identity = values.get("state_dict"), values.get(IDENTITY)
    if not isinstance(weights, Mapping) or not isinstance(identity, Mapping):
        return "is not a checkpoint of a run"
    compared = {key: identity.get(key) for key in expected}
    if isinstance(compared["data"], Mapping):
        compared["data"] = {key: compared["data"].get(key) for key in expected["data"]}
    held = flatten(compared)
    for key, (saved, current) in differences(compared, expected).items():
        is_option = key.rpartition(".")[2].isidentifier()  # not a slice of layers in `ffn_at`
        if is_option and saved is None and key not in held:
            continue  # newer than the checkpoint, which had its default
        return f"was made with {_short(key)} {_short(saved)}, but this run has {_short(current)}"
    tensors = getattr(weights, "described", weights)  # do not read sharded tensors
    for name, value in model.state_dict().items():
        if name not in tensors:
            return f"lacks the weight '{name}'"
        if isinstance(value, Tensor) and tensors[name].shape != value.shape:
            return f"has '{name}' of shape {tuple(tensors[name].shape)}, not {tuple(value.shape)}"
    return None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:12]}..."


# -- the resume point


@dataclass(frozen=True)
class ResumePoint:
    """The point from which a run resumes."""

    step: int = 0
    checkpoint: Path | None = None
    """File of the checkpoint; None to start again at the first step."""
    run_id: str | None = None
    """Id of the run; None if its files are lost."""
    validated_step: int = -1
    """Step of the last validation before the checkpoint; -1 without a validation."""
    sampled_step: int = -1
    """The same step if a text was generated there; otherwise -1."""
    skipped: tuple[str, ...] = ()
    """Newer checkpoints that cannot be used, each with the reason."""

    def describe(self, folder: Path) -> str:
        if self.checkpoint is None:
            return f"resuming {folder} from the start: it has no checkpoint"
        newer = f"; newer ones cannot be used: {'; '.join(self.skipped)}" if self.skipped else ""
        return f"resuming {folder} after step {self.step}, from {self.checkpoint.name}{newer}"


def find_resume_point(
    folder: Path, own: TrainConfig, data: PreparedData, module: nn.Module, trainer: TrainerConfig
) -> ResumePoint:
    """Return the newest checkpoint that is intact and belongs to this run.

    `own` are the options in the folder, `trainer` the new ones. The `module` has the names and shapes of the
    weights. Raises ConfigError if there are checkpoints but none can be used, if the run has passed the new
    `max_steps`, or if it is finished and its `max_time` is spent.
    """
    checkpoints = folder / CHECKPOINTS_FOLDER
    run_id = Facts.read(folder / FACTS_FILE).run_id or None
    expected = checkpoint_identity(own, data, run_id)

    def problem_of(values: Mapping[str, Any]) -> str | None:
        problem = problem_of_weights(values, expected, module)
        return problem or _problem_of_state(values, own, data, folder)

    with reading(checkpoints):
        usable, skipped = first_usable(newest_first(checkpoints), problem_of)
    if usable is None:
        if skipped:
            more = f"; and {len(skipped) - 1} more" if len(skipped) > 1 else ""
            raise ConfigError(
                f"'{checkpoints}' has no checkpoint to resume from: {skipped[0]}{more}; restore one, or "
                "start a new run"
            )
        return ResumePoint(run_id=run_id)
    path, values = usable
    if (step := values["global_step"]) > trainer.max_steps:
        raise ConfigError(
            f"trainer.max_steps ({trainer.max_steps}): the run is at step {step} already; give at least that"
        )
    callbacks = values["callbacks"]
    if is_finished(folder) and trainer.max_time is not None:
        _check_time_left(trainer.max_time, callbacks)
    validated_step = callbacks["ValidationLogger"]["last_step"]
    return ResumePoint(
        step,
        path,
        values[IDENTITY].get(RUN_ID),
        validated_step,
        validated_step if callbacks["SampleLog"]["last"] else -1,
        tuple(skipped),
    )


def _check_time_left(max_time: str | dict[str, int], callbacks: Mapping[str, Any]) -> None:
    """Raise ConfigError if the time in the callbacks' saved state is the limit or more."""
    from moe_ffn.training.recovery.stopping import StepTimer  # imports lightning

    timer = StepTimer(max_time)
    timer.load_state_dict(callbacks.get(timer.state_key, {}))
    if (left := timer.time_remaining()) is not None and left <= 0:
        elapsed = timedelta(seconds=int(timer.time_elapsed()))
        raise ConfigError(
            f"trainer.max_time ({max_time}): the run has trained for {elapsed} already; give more, or null"
        )


def _problem_of_state(
    values: Mapping[str, Any], own: TrainConfig, data: PreparedData, folder: Path
) -> str | None:
    """Load the state of a checkpoint into new objects; return the reason why this fails, or None."""
    from moe_ffn.runs.assemble import make_callbacks  # imports lightning

    for name in ("global_step", "loops", "optimizer_states", "lr_schedulers", "guard", "callbacks"):
        if name not in values:
            return f"lacks '{name}', so no run can be resumed from it"
    callbacks = make_callbacks(own, data, folder).saved
    try:
        StepGuard(own.trainer.guard).load_state_dict(values["guard"])
        for callback in callbacks:
            callback.load_state_dict(values["callbacks"][callback.state_key])
    except (AttributeError, KeyError, RuntimeError, TypeError, ValueError) as error:
        return f"holds a state that this version cannot load ({error!r})"
    return None


# -- the folder


def rewind(resume: Resume, start: ResumePoint, files: Mapping[str, str]) -> None:
    """Remove the lines logged after the checkpoint, and record that the run is resumed.

    Those of the `files` of a new run (name -> text) that are missing, damaged or out of date are written
    again. Raises ConfigError if the folder cannot be written.
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
        rename_skipped(folder / CHECKPOINTS_FOLDER, start.step)
        validated = start.validated_step
        _remove_lines(
            folder / METRICS_FILE,
            Row,
            lambda row: row.step <= (validated if row.is_validation else start.step),
            last_step=validated,
        )
        _remove_lines(
            folder / SAMPLES_FILE,
            Sample,
            lambda sample: sample.step <= validated,
            last_step=start.sampled_step,
        )
        _remove_lines(folder / ALARMS_FILE, Line, lambda alarm: alarm.step <= start.step)
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
        write_atomically(
            folder / RESUMES_FILE, f"{_text(folder / RESUMES_FILE)}{json.dumps(line)}\n"
        )
        _update_files(resume, files)
    except OSError as error:
        raise ConfigError(
            f"'{folder}' cannot be written ({reason(error)}), so the run cannot be resumed there; make room, "
            "or fix its permissions"
        ) from error


def _remove_lines(
    path: Path, kind: type[AnyLine], is_kept: Callable[[AnyLine], bool], last_step: int = -1
) -> None:
    """Remove the lines of a log for which `is_kept` is false, and damaged ones; warn of lost lines.

    The complete log has a line of `last_step`, unless that is -1.
    """
    count = num_damaged(path, kind)
    kept = cut_lines(path, kind, is_kept)
    if count:
        log.warning("'%s' is damaged: %d of its lines cannot be read and are removed", path, count)
    elif last_step >= 0 and all(line.step != last_step for line in kept):
        log.warning("'%s' lost lines: it has none of step %d", path, last_step)


def _update_files(resume: Resume, files: Mapping[str, str]) -> None:
    entries = CodeEntries.read(resume.folder / CODE_FILE).entries
    facts = _updated_facts(resume, files[FACTS_FILE])
    updated = {**files, FACTS_FILE: facts, **code_files(resume.config, entries)}
    for name, text in updated.items():
        path = resume.folder / name
        if _text(path) == text or (name == CONFIG_FILE and not resume.changes):
            continue
        is_lost = name == FACTS_FILE and not Facts.read(path).is_whole
        if is_lost or name in (TOKENIZER_FILE, DOCUMENTS_FILE):
            log.warning("'%s' is missing or damaged; it is recreated", path)
        write_file(resume.folder, name, text)


def _updated_facts(resume: Resume, new_facts: str) -> str:
    """Return the stored facts of a run with the current id and, after a change, those of the new options."""
    facts = Facts.read(resume.folder / FACTS_FILE)
    if not facts.is_whole:
        return new_facts
    keys = {RUN_ID}
    if resume.changes:
        keys |= {*resume.config.to_dict(), "teacher_sha256", "validation_sha256"}
    if "trainer.precision" in resume.changes:
        keys.add("precision")
    updates = {key: value for key, value in json.loads(new_facts).items() if key in keys}
    return json.dumps({**facts.model_dump(exclude_unset=True), **updates}, indent=2) + "\n"


def _text(path: Path) -> str:
    """Return the text of a file; empty if there is none."""
    return read_text(path, errors="replace") if path.exists() else ""
