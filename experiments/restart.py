"""Where a run that goes on begins, and its folder brought back to there."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from experiments.checkpoints import candidates, newest_good, refusal_to_resume
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
from experiments.sample_log import SampleLog
from moe_ffn.errors import ConfigError
from moe_ffn.files import remove_unfinished, set_aside, write_whole
from moe_ffn.training import json_lines, metrics_file
from moe_ffn.training.callbacks import StepLogger
from moe_ffn.training.config import PRECISIONS
from moe_ffn.training.metrics_file import STEP


@dataclass(frozen=True)
class Start:
    """Where a run goes on."""

    step: int
    checkpoint: Path | None
    """None where none was saved yet: from the first step."""
    passed_over: tuple[str, ...]
    callbacks: Mapping[str, Any]
    """The states of the callbacks, by their names."""

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
        return Start(found.step, found.path, tuple(passed_over), found.values["callbacks"])
    if passed_over:
        more = f"; and {len(passed_over) - 1} more" if len(passed_over) > 1 else ""
        raise ConfigError(
            f"'{checkpoints}' has no checkpoint to go on from: {passed_over[0]}{more}; start a new run, or "
            "remove the folder to train this one from its first step"
        )
    return Start(0, None, (), {})


def first_precision(folder: Path, precision: str) -> str:
    """What `trainer.precision: auto` was when the run began; `precision` where nobody knows any more."""
    return _facts(folder / FACTS_FILE).get("precision", precision)


def go_back(resume: Resume, start: Start, files: Mapping[str, str]) -> dict[str, str]:
    """Remove what was written after the checkpoint, and note down that the run goes on.

    What is damaged is mended, with a line about it.

    Args:
        files: what the run would be begun with now, by name.

    Returns:
        what it was begun with: the same, but for what is known of it still.

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
        damaged = {
            path
            for path, num_damaged in [
                (folder / METRICS_FILE, metrics_file.num_damaged),
                (folder / SAMPLES_FILE, json_lines.num_damaged),
                (folder / ALARMS_FILE, json_lines.num_damaged),
            ]
            if _keep_damaged(path, num_damaged(path))
        }
        metrics_file.cut_rows(folder / METRICS_FILE, start.step)
        for name in (SAMPLES_FILE, ALARMS_FILE):
            json_lines.cut_lines(folder / name, start.step)
        for path, what in _lost(folder, start.callbacks).items():
            if path not in damaged:
                print(f"'{path}' {what}; the rest is lost, and the run goes on", file=sys.stderr)
        (folder / SUMMARY_FILE).unlink(missing_ok=True)
        if resume.changes:
            write_whole(folder / CONFIG_FILE, files[CONFIG_FILE])
        files = _mend(folder, files)
    except OSError as error:
        raise ConfigError(
            f"'{folder}' cannot be written ({error.strerror}), so the run cannot go on there; make room, or "
            "mend its permissions"
        ) from error
    json_lines.JsonLines(folder / RESUMES_FILE).add([line])
    return files


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
    last_step = max((int(row[STEP]) for row in metrics_file.read_rows(metrics)), default=0)
    if last_step < (expected := steps.get("last_row_step", 0)):
        lost[metrics] = f"ends at step {last_step}, not {expected}"
    if (number := len(json_lines.read_lines(alarms))) < (expected := steps.get("num_alarms", 0)):
        lost[alarms] = f"has {number} alarms, not {expected}"
    if text and text not in [line.get("text") for line in json_lines.read_lines(samples)[-1:]]:
        lost[samples] = "does not end with the newest text"
    return lost


def _mend(folder: Path, files: Mapping[str, str]) -> dict[str, str]:
    """Facts and tokenizer as they are; those of `files` written in the place of what is damaged."""
    good: dict[str, str] = {}
    for name, text in files.items():
        path = folder / name
        found = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        if name == FACTS_FILE:
            is_good = bool(_facts(path))
        else:
            is_good = found == text
        if not is_good and name != CONFIG_FILE:
            what = "is not what this run was begun with" if found else "is missing or empty"
            print(f"'{path}' {what}; it is written anew", file=sys.stderr)
            write_whole(path, text)
        good[name] = found if is_good else text
    return good


def _facts(path: Path) -> dict[str, Any]:
    """Empty where they are no facts of a run."""
    try:
        facts = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return facts if isinstance(facts, dict) and facts.get("precision") in PRECISIONS else {}


def how_to_go_on(folder: Path) -> str:
    """What to type, and what that will begin from."""
    newest = next(iter(candidates(folder / CHECKPOINTS_FOLDER)), None)
    saved = "no checkpoint was saved" if newest is None else f"saved {newest.name}"
    return f"{saved}; go on with: python -m experiments.train --resume {folder}"
