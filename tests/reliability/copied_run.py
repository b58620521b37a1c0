"""A finished run, made once, of which every case changes a copy."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from experiments.selftest.scene import Finished, lasting_folder, options, run_here
from moe_ffn.config_files import read_config
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.start import Start, find_start
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.recovery.checkpoint_file import read_checkpoint, step_name, write_checkpoint

OLDER, NEWEST = step_name(8), step_name(12)

Do = Callable[[Path], object]
"""Changes a folder of checkpoints, or of a run."""


def cases(table: Mapping[str, Any], in_every_suite: Collection[str] = ()) -> list[Any]:
    """The rows of a table, each by its name; those that are not in every suite are slow."""
    assert set(in_every_suite) <= table.keys()
    return [
        pytest.param(*row, id=name, marks=[] if name in in_every_suite else pytest.mark.slow)
        for name, row in table.items()
    ]


@cache
def scene() -> Path:
    return lasting_folder()


@cache
def trained(**changes: str) -> Path:
    """A run with checkpoints of steps 8 and 12; nobody writes to it."""
    name = "-".join(["run", *(part for change in changes.items() for part in change)])
    done = run_here(*options(scene(), **{"run__name": name, **changes}))
    assert done.code == 0, done.stderr
    return scene() / "runs" / name


@cache
def expected() -> tuple[TrainConfig, dict[str, Any], LanguageModel]:
    """What the run has to agree in with a checkpoint."""
    from moe_ffn.data.prepare import prepare
    from moe_ffn.runs.assemble import build_module
    from moe_ffn.runs.record import identity

    config = read_config(trained() / "config.yaml", TrainConfig)
    data = prepare(config.data, progress=False)
    return config, identity(config, data), build_module(config, data)


def unfinished_copy(folder: Path) -> Path:
    """The run, as if its process had died just before its end."""
    copied = Path(shutil.copytree(trained(), folder / "run"))
    (copied / "summary.json").unlink()
    return copied


def start_of(folder: Path) -> Start:
    return find_start(folder, *expected())


def resume(folder: Path, *argv: str) -> Finished:
    return run_here("--resume", str(folder), *argv)


def files_of(folder: Path) -> dict[str, bytes]:
    found = (path for path in folder.rglob("*") if path.is_file() and path.name != ".lock")
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


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
