"""Links are followed when reading and never written through; a pipe is read or rejected at once."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moe_ffn.config.errors import ConfigError
from moe_ffn.config.yaml_files import read_yaml
from moe_ffn.data.prepare import DataConfig, prepare
from moe_ffn.runs.folder import CHECKPOINTS_FOLDER, METRICS_FILE
from tests.helpers.tiny_runs import finished_copy, run_here


def test_links_to_runs_and_their_folders_are_followed(tmp_path: Path) -> None:
    """`checkpoints/` was moved to another disk, and the run is linked into a folder of results."""
    run = finished_copy(tmp_path)
    elsewhere = (run / CHECKPOINTS_FOLDER).rename(tmp_path / "other-disk")
    (run / CHECKPOINTS_FOLDER).symlink_to(elsewhere)
    (run / METRICS_FILE).rename(tmp_path / "metrics")
    (run / METRICS_FILE).symlink_to(tmp_path / "metrics")
    rows = (tmp_path / "metrics").read_text()
    link = tmp_path / "latest"
    link.symlink_to(run)

    for program in ("generate", "report", "compare"):
        done = run_here(str(link), program=f"moe_ffn.cli.{program}")
        assert done.code == 0, (program, done.stderr)
    done = run_here("--resume", str(link), "--trainer.max_steps", "14")
    assert done.code == 0, done.stderr

    assert (elsewhere / "step_00000014.ckpt").is_file()
    assert (run / CHECKPOINTS_FOLDER).is_symlink()
    assert not (run / METRICS_FILE).is_symlink(), "rows are added to a copy"
    assert (tmp_path / "metrics").read_text() == rows


def test_checkpoints_on_a_disk_that_is_not_mounted_are_named(tmp_path: Path) -> None:
    run = finished_copy(tmp_path)
    (run / CHECKPOINTS_FOLDER).rename(tmp_path / "other-disk")
    (run / CHECKPOINTS_FOLDER).symlink_to(tmp_path / "unmounted")

    done = run_here(str(run), program="moe_ffn.cli.generate")

    (line,) = done.own_lines
    assert line == (
        f"error: '{run / CHECKPOINTS_FOLDER}' is a link to '{tmp_path / 'unmounted'}', which does not exist; "
        "mount its disk, or restore it"
    )


def test_a_config_in_a_pipe_is_read() -> None:
    """`--config <(command)` names such a pipe."""
    end, start = os.pipe()
    with os.fdopen(end), os.fdopen(start, "w") as writer:
        writer.write("seed: 7\n")
        writer.close()
        assert read_yaml(Path(f"/dev/fd/{end}"), "--config") == {"seed": 7}


def test_a_corpus_in_a_pipe_is_rejected(tmp_path: Path) -> None:
    path = tmp_path / "pipe.txt"
    os.mkfifo(path)
    config = DataConfig.model_validate({"corpus": {"type": "text", "paths": [str(path)]}})

    with pytest.raises(ConfigError, match=r"data\.corpus\.path.*pipe\.txt"):
        prepare(config)
