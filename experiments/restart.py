"""Where a run that goes on begins, and its folder brought back to there."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.checkpoints import candidates, newest_good, refusal_to_resume
from experiments.command_line import to_yaml
from experiments.resume import Resume
from experiments.run_folder import (
    ALARMS_FILE,
    CHECKPOINTS_FOLDER,
    CONFIG_FILE,
    FACTS_FILE,
    METRICS_FILE,
    RESUMES_FILE,
    SAMPLES_FILE,
    SUMMARY_FILE,
    git_revision,
)
from moe_ffn.errors import ConfigError
from moe_ffn.files import write_whole
from moe_ffn.training.json_lines import JsonLines, cut_lines
from moe_ffn.training.metrics_file import cut_rows


@dataclass(frozen=True)
class Start:
    """Where a run goes on."""

    step: int
    checkpoint: Path | None
    """None where none was saved yet: from the first step."""
    passed_over: tuple[str, ...]

    def describe(self, folder: Path) -> str:
        """Which checkpoint, and why this one."""
        if self.checkpoint is None:
            return f"resuming {folder} from the start: no checkpoint was saved before it ended"
        why = "; ".join(self.passed_over)
        which = (
            f"passed over {why}; the newest good one" if why else "its newest checkpoint, and good"
        )
        return f"resuming {folder} after step {self.step}, from {self.checkpoint.name}: {which}"


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
        candidates(checkpoints), lambda values: refusal_to_resume(values, identity, state)
    )
    if found is not None:
        return Start(found.step, found.path, tuple(passed_over))
    if passed_over:
        more = f"; and {len(passed_over) - 1} more" if len(passed_over) > 1 else ""
        raise ConfigError(
            f"'{checkpoints}' has no checkpoint to go on from: {passed_over[0]}{more}; start a new run, or "
            "remove the folder to train this one from its first step"
        )
    return Start(0, None, ())


def first_precision(folder: Path, precision: str) -> str:
    """What `trainer.precision: auto` was when the run began; `precision` where nobody knows any more."""
    try:
        known = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
        return str(known.get("precision", precision))
    except (OSError, ValueError, AttributeError):
        return precision


def go_back(resume: Resume, start: Start) -> None:
    """Remove what was written after the checkpoint, and note down that the run goes on."""
    folder = resume.folder
    line = {
        "step": start.step,
        "checkpoint": None if start.checkpoint is None else start.checkpoint.name,
        "passed_over": start.passed_over,
        "changes": resume.changes,
        "git_revision": git_revision(),
    }
    try:
        cut_rows(folder / METRICS_FILE, start.step)
        for name in (SAMPLES_FILE, ALARMS_FILE):
            cut_lines(folder / name, start.step)
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
        if resume.changes:
            write_whole(folder / CONFIG_FILE, to_yaml(resume.config))
    except OSError as error:
        raise ConfigError(
            f"'{folder}' cannot be written ({error.strerror}), so the run cannot go on there; make room, or "
            "mend its permissions"
        ) from error
    JsonLines(folder / RESUMES_FILE).add([line])


def how_to_go_on(folder: Path) -> str:
    """What to type, and what that will begin from."""
    newest = next(iter(candidates(folder / CHECKPOINTS_FOLDER)), None)
    saved = "no checkpoint was saved" if newest is None else f"saved {newest.name}"
    return f"{saved}; go on with: python -m experiments.train --resume {folder}"
