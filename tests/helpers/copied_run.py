"""Going on with a copy of the finished run, in which a file was changed or lost."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

from moe_ffn.config.yaml_files import read_config
from moe_ffn.data.prepare import PreparedData, prepare
from moe_ffn.runs.assemble import build_module
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import CONFIG_FILE
from moe_ffn.runs.resume import Start, find_start
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.recovery.checkpoint_file import read_checkpoint, write_checkpoint
from tests.helpers.tiny_runs import Finished, run_here, trained

Do = Callable[[Path], object]
"""Changes a file, a folder of checkpoints, or a run."""


@cache
def expected() -> tuple[TrainConfig, PreparedData, LanguageModel]:
    """What the run has to agree in with a checkpoint."""
    config = read_config(trained() / CONFIG_FILE, TrainConfig)
    data = prepare(config.data)
    return config, data, build_module(config, data)


def start_of(folder: Path) -> Start:
    config, data, module = expected()
    return find_start(folder, config, data, module, config.trainer.max_steps)


def resume(folder: Path, *argv: str) -> Finished:
    return run_here("--resume", str(folder), *argv)


def rewrite(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Change what is in a checkpoint, whose checksum is right again."""
    values = read_checkpoint(path)
    change(values)
    write_checkpoint(values, path)


def lose(*names: str) -> Do:
    def do(folder: Path) -> None:
        for name in names:
            (folder / name).unlink()

    return do
