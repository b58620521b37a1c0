"""Where a run that goes on begins: at the newest of its checkpoints that is whole and its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moe_ffn.data.split import Documents, changed
from moe_ffn.errors import ConfigError, command
from moe_ffn.files import read_object
from moe_ffn.runs.checkpoints import best_checkpoint, newest_good, refusal_to_resume
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.documents import Facts
from moe_ffn.runs.folder import (
    CHECKPOINTS_FOLDER,
    DOCUMENTS_FILE,
    FACTS_FILE,
    METRICS_FILE,
    SAVED_FILE,
    SUMMARY_FILE,
)
from moe_ffn.runs.record import (
    PRECISION,
    RUN_ID,
    RunRecord,
)
from moe_ffn.runs.training_checks import require_training
from moe_ffn.training.config import PRECISIONS
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.monitoring.json_lines import Row, read_lines
from moe_ffn.training.recovery.checkpoint_file import (
    IDENTITY,
    is_misnamed,
    likely_step,
    newest_first,
    step_inside,
    step_name,
    step_of,
)
from moe_ffn.training.recovery.checkpoint_keeper import CheckpointKeeper


@dataclass(frozen=True)
class Start:
    """Where a run goes on."""

    step: int
    checkpoint: Path | None
    """None where none was saved yet: from the first step."""
    passed_over: tuple[str, ...]
    callbacks: Mapping[str, Any]
    """The states of the callbacks, by their names."""
    run_id: str | None = None
    """None where nobody knows it any more."""
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
        why = "; ".join(self.passed_over)
        which = (
            f"passed over {why}; the newest good one" if why else "its newest checkpoint, and good"
        )
        name = self.checkpoint.name
        if is_misnamed(self.checkpoint, self.step):
            name = f"{name}, which {_holds(self.checkpoint, self.step)}"
        return f"resuming {folder} after step {self.step}, from {name}: {which}"


def check_documents(folder: Path, now: Documents) -> None:
    """ConfigError that names the first document which is not what the run began with.

    Where the run's list is lost, the checkpoint still knows that the corpus is another.
    """
    try:
        began_with = Documents.from_dict(read_object(folder / DOCUMENTS_FILE))
    except ConfigError:
        return
    change = changed(began_with, now)
    if change:
        raise ConfigError(
            f"data.corpus: {change}, since '{folder}' began; put back what it was, or start a new run"
        )


def find_start(
    folder: Path, own: TrainConfig, identity: Mapping[str, Any], module: LanguageModel
) -> Start:
    """The newest checkpoint that is whole and of this very run.

    Args:
        folder: of the run.
        own: the options in it.
        identity: what the checkpoint has to agree in.
        module: of the run, as it begins, which it has to fit.

    Raises:
        ConfigError: there are checkpoints, and none is good; or there are none, and there were.
    """
    checkpoints, record = folder / CHECKPOINTS_FOLDER, RunRecord.read(folder, own)
    candidates = newest_first(checkpoints)

    found, passed_over = newest_good(
        candidates, lambda values: refusal_to_start(values, own, identity, module, record)
    )
    if found is not None:
        others = candidates[candidates.index(found.path) + 1 :]
        passed_over += [
            f"{path.name} {_holds(path, found.step)}"
            for path in others
            if step_inside(path) == found.step
        ]
        if lost := _lost(record, found.step, candidates):
            passed_over.insert(0, f"{lost} is missing")
        made_with = found.values[IDENTITY]
        return Start(
            found.step,
            found.path,
            tuple(passed_over),
            found.values["callbacks"],
            made_with[RUN_ID],
            made_with,
        )
    if passed_over:
        more = f"; and {len(passed_over) - 1} more" if len(passed_over) > 1 else ""
        raise ConfigError(
            f"'{checkpoints}' has no checkpoint to go on from: {passed_over[0]}{more}; put back what was "
            "there, or start a new run"
        )
    _require_that_none_was_saved(folder, own, record)
    return Start(0, None, (), {}, record.run_id)


def refusal_to_start(
    values: Mapping[str, Any],
    own: TrainConfig,
    identity: Mapping[str, Any],
    module: LanguageModel,
    record: RunRecord,
) -> str | None:
    """Why a run does not go on from a checkpoint with these values; None where it does.

    Raises:
        CheckpointError: the same, of what is malformed.
    """
    refusal = refusal_to_resume(values, identity, module) or record.refusal(values[IDENTITY])
    if refusal is None:
        require_training(values, module, own.trainer.accumulate_grad_batches)
    return refusal


def _holds(path: Path, step: int) -> str:
    return f"holds step {step}, not {step_of(path)}"


def _lost(record: RunRecord, step: int, candidates: Sequence[Path]) -> str:
    """The name of the checkpoint that was saved last, where it is later than `step` and not there."""
    saved = None if record.saved is None else record.saved.last_saved_step
    if saved is None or saved <= step or any(likely_step(path) >= saved for path in candidates):
        return ""
    return step_name(saved)


def _require_that_none_was_saved(folder: Path, own: TrainConfig, record: RunRecord) -> None:
    """ConfigError where a run without a checkpoint had one: as it wrote down itself, or by its rows."""
    saved, checkpoints = record.saved, folder / CHECKPOINTS_FOLDER
    has_ended = (folder / SUMMARY_FILE).exists()
    if saved is not None and saved.last_saved_step is not None:
        why = f"though {SAVED_FILE} says that {step_name(saved.last_saved_step)} was saved; put it back"
    elif saved is None and (has_ended or _last_row(folder) > _first_saved_step(own)):
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


def _last_row(folder: Path) -> int:
    return max((row.step for row in read_lines(folder / METRICS_FILE, Row)), default=0)


def _first_saved_step(own: TrainConfig) -> int:
    """After which optimizer step a run has a checkpoint, if the disk took it."""
    return own.checkpoints.every_n_steps or own.trainer.validate_every_n_steps


def first_precision(folder: Path, start: Start, precision: str) -> str:
    """What `trainer.precision: auto` was when the run began; `precision` where nobody knows any more."""
    known = [Facts.read(folder / FACTS_FILE).precision, start.made_with.get(PRECISION)]
    return next((str(name) for name in PRECISIONS if name in known), precision)


def how_to_go_on(folder: Path, keeper: CheckpointKeeper) -> str:
    """What to type, and what that will begin from."""
    step = keeper.last_saved_step
    saved = "no checkpoint was saved" if step < 0 else f"saved {step_name(step)}"
    return f"{saved}; go on with: {command('train')} --resume {folder}"
