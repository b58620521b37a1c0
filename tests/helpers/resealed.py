"""A finished run, and checkpoints of it that were written again with other content and a right checksum."""

from __future__ import annotations

import copy
import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from moe_ffn.config.yaml_files import read_config
from moe_ffn.data.prepare import prepare
from moe_ffn.runs.assemble import build_module
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import CHECKPOINTS_FOLDER, CONFIG_FILE, SAVED_FILE
from moe_ffn.runs.record import RunRecord
from moe_ffn.runs.resume import Start, find_start, refusal_to_start
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.recovery.checkpoint_file import (
    CheckpointError,
    newest_first,
    read_checkpoint,
    step_of,
    write_checkpoint,
)
from tests.helpers.tiny_runs import options, run_here

BEST = "best.ckpt"
OPTIONS = {
    "run__name": "run",
    "trainer__max_steps": "9",
    "trainer__validate_every_n_steps": "4",
    "checkpoints__every_n_steps": "1",
    "checkpoints__keep_last": "9",
    "optimizer__type": "adamw",  # which counts its steps
    "logging__every_n_steps": "3",  # so that after step 7 a row is half full
    "logging__alarms__router_logit": "0.01",
}


def train(folder: Path, **changes: str) -> Path:
    """The folder of a finished tiny run, with a checkpoint of every step."""
    done = run_here(*options(folder, **(OPTIONS | changes)))
    assert done.code == 0, done.stderr
    return folder / "runs" / "run"


class Scene:
    """A run, and what is expected of a checkpoint of it."""

    def __init__(self, run: Path, num_later: int) -> None:
        """As if its process had died `num_later` checkpoints before its end."""
        self.run = run
        self.config = config = read_config(run / CONFIG_FILE, TrainConfig)
        self.data = prepare(config.data, progress=False)
        self.module: LanguageModel = build_module(config, self.data)
        record = RunRecord.read(run, config)
        self._refusal = refusal_to_start(run, config, self.data, self.module, record)
        self.newest, *older = newest_first(run / CHECKPOINTS_FOLDER)[num_later:]
        self.older = older[0] if older else self.newest
        self.best = run / CHECKPOINTS_FOLDER / BEST
        self.values = read_checkpoint(self.newest)

    def fresh_values(self) -> dict[str, Any]:
        """Of the newest checkpoint, to be changed; weights and moments are the scene's own."""
        return shallow(self.values)

    def refuse(self, values: Mapping[str, Any]) -> str | None:
        """The reason why it does not go on from them."""
        try:
            return self._refusal(values)
        except CheckpointError as error:
            return str(error)

    def start(self, run: Path) -> Start:
        return find_start(run, self.config, self.data, self.module)


def shallow(value: Any) -> Any:
    """A copy of containers and not of what they hold."""
    if isinstance(value, dict):
        return {key: shallow(inner) for key, inner in value.items()}
    return [shallow(inner) for inner in value] if isinstance(value, list) else value


def unfinished(
    run: Path, folder: Path, checkpoints: Mapping[str, Path | Mapping[str, Any]]
) -> Path:
    """A copy of a run as if its process had died, with these checkpoints: files to link to, or values."""
    copied = folder / "run"
    ignored = shutil.ignore_patterns(CHECKPOINTS_FOLDER, "summary.json", "report.html")
    shutil.copytree(run, copied, ignore=ignored)
    (copied / CHECKPOINTS_FOLDER).mkdir()
    saved = json.loads((copied / SAVED_FILE).read_text())
    steps = [step_of(Path(name)) for name in checkpoints if name != BEST]
    (copied / SAVED_FILE).write_text(json.dumps({**saved, "last_saved_step": max(steps)}))
    for name, content in checkpoints.items():
        path = copied / CHECKPOINTS_FOLDER / name
        if isinstance(content, Path):
            os.link(content, path)
        else:
            write_checkpoint(dict(content), path)
    return copied


def put(values: Any, path: str, value: Any) -> None:
    """Replace what is at `path`, `guard/losses/0`; a function is given what is there."""
    *parents, last = [int(part) if part.isdigit() else part for part in path.split("/")]
    for part in parents:
        values = values[part]
    values[last] = value(copy.deepcopy(values[last])) if isinstance(value, Callable) else value


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every path below the top, of containers too."""
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*path, key))
    elif isinstance(value, list):
        for place, inner in enumerate(value):
            yield from places(inner, (*path, place))
