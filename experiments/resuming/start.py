"""Where a run that goes on begins, and its folder brought back to there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.resuming.checkpoints import (
    best_checkpoint,
    newest_good,
    refusal_to_resume,
)
from experiments.resuming.mending import cut_logs, mend_files, read_facts
from experiments.resuming.request import Resume, own_config
from experiments.run_folder import (
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    DOCUMENTS_FILE,
    FACTS_FILE,
    METRICS_FILE,
    RESUMES_FILE,
    SUMMARY_FILE,
    git_revision,
)
from moe_ffn.data.documents import Documents, changed
from moe_ffn.errors import ConfigError, reason
from moe_ffn.files import read_text, remove_unfinished, write_whole
from moe_ffn.training.checkpoint_folder import step_checkpoints, step_name, step_of
from moe_ffn.training.checkpoint_keeper import CheckpointKeeper
from moe_ffn.training.metrics_file import STEP, VALIDATION_LOSS, read_rows


@dataclass(frozen=True)
class Start:
    """Where a run goes on."""

    step: int
    checkpoint: Path | None
    """None where none was saved yet: from the first step."""
    passed_over: tuple[str, ...]
    callbacks: Mapping[str, Any]
    """The states of the callbacks, by their names."""

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
        return f"resuming {folder} after step {self.step}, from {self.checkpoint.name}: {which}"


def check_documents(folder: Path, now: Documents) -> None:
    """ConfigError that names the first document which is not what the run began with.

    Where the run's list is lost, the checkpoint still knows that the corpus is another.
    """
    try:
        text = read_text(folder / DOCUMENTS_FILE)
        change = changed(Documents.from_dict(json.loads(text)), now)
    except (OSError, ValueError):
        return
    if change:
        raise ConfigError(
            f"data.corpus: {change}, since '{folder}' began; put back what it was, or start a new run"
        )


def find_start(folder: Path, identity: Mapping[str, Any], state: Mapping[str, Tensor]) -> Start:
    """The newest checkpoint that is whole and of this very run.

    Args:
        folder: of the run.
        identity: what the checkpoint has to agree in.
        state: of the model that it has to fit.

    Raises:
        ConfigError: there are checkpoints, and none is good.
    """
    checkpoints = folder / CHECKPOINTS_FOLDER
    found, passed_over = newest_good(
        step_checkpoints(checkpoints), lambda values: refusal_to_resume(values, identity, state)
    )
    if found is not None:
        return Start(found.step, found.path, tuple(passed_over), found.values["callbacks"])
    if passed_over:
        more = f"; and {len(passed_over) - 1} more" if len(passed_over) > 1 else ""
        raise ConfigError(
            f"'{checkpoints}' has no checkpoint to go on from: {passed_over[0]}{more}; start a new run"
        )
    _require_an_early_end(folder)
    return Start(0, None, (), {})


def _require_an_early_end(folder: Path) -> None:
    """ConfigError where a run without a checkpoint had come so far that it must have had one."""
    rows = read_rows(folder / METRICS_FILE)
    validations = [int(row[STEP]) for row in rows if VALIDATION_LOSS in row]
    if (len(validations) > 1 and validations[-1] > _first_saved_step(folder)) or (
        folder / SUMMARY_FILE
    ).exists():
        checkpoints = folder / CHECKPOINTS_FOLDER
        best = best_checkpoint(checkpoints)
        but = f" ({best[0].name} holds weights alone)" if best else ""
        raise ConfigError(
            f"'{checkpoints}' has no checkpoint to go on from{but}, though the run came further than its "
            "first; put them back, or start a new run"
        )


def _first_saved_step(folder: Path) -> int:
    """After which optimizer step a run has a checkpoint; it may have come to validations before."""
    config = own_config(folder / CONFIG_FILE)
    return config.checkpoints.every_n_steps or config.trainer.validate_every_n_steps


def first_precision(folder: Path, precision: str) -> str:
    """What `trainer.precision: auto` was when the run began; `precision` where nobody knows any more."""
    return read_facts(folder / FACTS_FILE).get("precision", precision)


def go_back(resume: Resume, start: Start, files: Mapping[str, str]) -> dict[str, str]:
    """Remove what was written after the checkpoint, and note down that the run goes on.

    What is damaged is mended, with a line about it.

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
        "changes": resume.changes,
        "git_revision": git_revision(),
    }
    try:
        remove_unfinished(folder)
        _pass_over_newer(folder / CHECKPOINTS_FOLDER, start.step)
        cut_logs(folder, start.step, start.callbacks)
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
        resumes = read_text(path, "replace") if (path := folder / RESUMES_FILE).exists() else ""
        write_whole(path, f"{resumes}{json.dumps(line)}\n")
        files = mend_files(resume, files)
    except OSError as error:
        raise ConfigError(
            f"'{folder}' cannot be written ({reason(error)}), so the run cannot go on there; make room, or "
            "mend its permissions"
        ) from error
    return files


def _pass_over_newer(checkpoints: Path, step: int) -> None:
    """Rename those of later steps, which are damaged: read again one day, they would be of another past."""
    for path in step_checkpoints(checkpoints):
        if step_of(path) > step:
            path.replace(path.with_name(f"{path.name}.passed-over"))


def how_to_go_on(folder: Path, keeper: CheckpointKeeper) -> str:
    """What to type, and what that will begin from."""
    step = keeper.last_saved_step
    saved = "no checkpoint was saved" if step < 0 else f"saved {step_name(step)}"
    return f"{saved}; go on with: python -m experiments.train --resume {folder}"
