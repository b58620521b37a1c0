"""A run in a folder whose name is not UTF-8 is read and gone on with as any other."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from moe_ffn.config.yaml_files import to_yaml
from moe_ffn.report.html import render, write_page
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import CONFIG_FILE, METRICS_FILE, SUMMARY_FILE
from moe_ffn.training.config import WandbConfig
from moe_ffn.training.monitoring.loggers import wandb_logger
from tests.helpers.tiny_runs import finished_copy, options, run, run_here, unfinished_copy

NAME = os.fsdecode(b"run-\xff")
SHOWN = r"run-\udcff"


@pytest.fixture(autouse=True)
def _such_names(tmp_path: Path) -> None:
    try:
        (tmp_path / NAME).mkdir()
    except OSError:
        pytest.skip("this file system has no such names")
    (tmp_path / NAME).rmdir()


def test_a_page_shows_such_a_name_as_escapes(tmp_path: Path) -> None:
    write_page(tmp_path / "page.html", render("page.html", title=f"{NAME} wörter"))

    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert f"<title>{SHOWN} wörter</title>" in page


@pytest.mark.slow
def test_runs_of_such_names_have_a_page(tmp_path: Path) -> None:
    folders = [tmp_path / where / NAME for where in ("one", "other")]
    for folder in folders:
        folder.mkdir(parents=True)
        (folder / CONFIG_FILE).write_text(to_yaml(TrainConfig()))
        (folder / METRICS_FILE).write_text('{"step": 2, "train/loss": 1.0}\n')

    for runs in (folders[:1], folders):
        page = tmp_path / "page.html"
        done = run_here(*map(str, runs), "--output", str(page), program="moe_ffn.cli.report")
        assert done.code == 0, done.stderr
        assert SHOWN in page.read_text(encoding="utf-8")


def test_a_new_run_of_such_a_name_is_refused(tmp_path: Path) -> None:
    """Its config.yaml could not hold it."""
    done = run_here(*options(tmp_path, run__name=NAME))

    said = f"error: run.name: must be the name of one folder, up to 200 bytes, got '{NAME}'"
    assert (done.code, done.own_lines) == (2, [said.replace(NAME, SHOWN)])


ENVIRONMENTS = {
    "strict": {"PYTHONIOENCODING": "utf-8:strict"},
    "ascii": {"PYTHONIOENCODING": "ascii:strict"},
    "C": {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"},
}
PROGRAMS: dict[str, Callable[[Path], tuple[str, ...]]] = {
    "generate": lambda run: (str(run), "--num-tokens", "2"),
    "trace": lambda run: (str(run), "--text", "the", "--html", str(run / "trace.html")),
    "report": lambda run: (str(run),),
    "train": lambda run: ("--resume", str(run), "--trainer.max_steps", "14"),
}


@pytest.mark.slow
@pytest.mark.parametrize("environment", ENVIRONMENTS)
@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_on_such_a_run(tmp_path: Path, program: str, environment: str) -> None:
    folder = finished_copy(tmp_path).rename(tmp_path / NAME)

    done = run(
        *PROGRAMS[program](folder),
        program=f"moe_ffn.cli.{program}",
        **ENVIRONMENTS[environment],
    )

    assert done.code == 0, done.stderr
    assert "Traceback" not in done.stderr
    if program == "train":
        assert "report.html: " not in done.stderr
        assert (folder / SUMMARY_FILE).exists()


@pytest.mark.parametrize("mode", ["auto", "offline"])
def test_wandb_is_off_in_such_a_run(tmp_path: Path, mode: str) -> None:
    config = WandbConfig.model_validate({"mode": mode})

    assert wandb_logger(config, tmp_path / NAME, [], {}) == (
        None,
        "wandb: off (the run's path is not UTF-8), metrics are in metrics.jsonl",
    )


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["auto", "offline"])
def test_wandb_does_not_stand_in_the_way_of_such_a_run(tmp_path: Path, mode: str) -> None:
    folder = unfinished_copy(tmp_path).rename(tmp_path / NAME)
    shutil.rmtree(folder / "wandb", ignore_errors=True)

    done = run(
        "--resume", str(folder), "--trainer.max_steps", "14", "--logging.wandb.mode", mode,
        WANDB_API_KEY="",
    )  # fmt: skip

    assert done.code == 0, done.stderr
    assert "Traceback" not in done.stderr
    assert sum(line.startswith("wandb: ") for line in done.stdout.splitlines()) == 1, done.stdout
