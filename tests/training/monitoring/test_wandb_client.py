"""The real client in this process: what it is asked, refuses and keeps; a resumed run.

In whole runs of the program, it is in `tests/cli/test_train_wandb.py`.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from moe_ffn.data.prepare import PreparedData
from moe_ffn.runs.assemble import build_module, build_trainer, make_callbacks, make_token_data
from moe_ffn.runs.config import TrainConfig
from moe_ffn.training.config import WandbConfig
from moe_ffn.training.monitoring.loggers import close, wandb_logger
from tests.helpers.fake_wandb import history, inspect

pytestmark = pytest.mark.usefixtures("nobodys_wandb")

FOLDER = r"runs/mine/wandb/offline-run-\S+"
COMMANDS = rf"look: wandb leet {FOLDER}; upload: wandb sync {FOLDER}"
NO_KEY = r"wandb: offline \(No API key configured\. Use `wandb login` to log in\); " + COMMANDS
ITS_FOLDERS = ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_DATA_DIR", "WANDB_CONFIG_DIR")


@pytest.fixture
def real_wandb() -> Iterator[Any]:
    import wandb

    yield wandb
    wandb.teardown()


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (
            {"WANDB_API_KEY": "abc"},
            rf"wandb: offline \(WANDB_API_KEY invalid: API key must have 40\+ characters, has 3\); "
            rf"{COMMANDS}",
        ),
        (dict.fromkeys(ITS_FOLDERS, "/proc/none"), NO_KEY),
    ],
    ids=["key too short", "folders unwritable"],
)
def test_it_keeps_a_run_offline_and_the_line_says_why(
    real_wandb: Any,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    environment: dict[str, str],
    expected: str,
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    run_dir = tmp_path / "runs" / "mine"
    run_dir.mkdir(parents=True)

    logger, line = wandb_logger(WandbConfig(), run_dir, ["moe"], {"seed": 0})
    assert logger is not None
    logger.log_metrics({"train/loss": 2.5}, step=1)
    close([logger])

    assert re.fullmatch(expected, line)
    printed = capfd.readouterr()
    assert printed.out == ""
    # Its own process logs to the terminal where it may write nowhere else.
    assert not re.search("^wandb:|Traceback", printed.err, re.MULTILINE)
    (folder,) = (run_dir / "wandb").glob("*run-*")
    monkeypatch.undo()
    rows = history(inspect(folder, dict(os.environ)))
    assert rows == [{"train/loss": 2.5, "trainer/global_step": 1}]


def test_it_is_not_asked_where_its_mode_is_disabled(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")

    assert wandb_logger(WandbConfig(), tmp_path, [], {}) == (None, "wandb: off")
    assert not (tmp_path / "wandb").exists()


def test_a_file_where_wandb_would_write_is_no_hindrance(real_wandb: Any, tmp_path: Path) -> None:
    run_dir = tmp_path / "mine"
    run_dir.mkdir()
    (run_dir / "wandb").write_text("in the way")

    logger, line = wandb_logger(WandbConfig(mode="offline"), run_dir, [], {})

    assert logger is None
    assert line.startswith("wandb: off (")
    assert line.endswith("), metrics are in metrics.jsonl")


class KilledError(Exception):
    pass


class KillAfterValidation(Callback):
    """Saves and breaks off once the first validation is over."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint = checkpoint

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(self.checkpoint)
        raise KilledError


def test_a_resumed_run_resumes_its_wandb_run(
    real_wandb: Any,
    make_config: Callable[..., TrainConfig],
    prepared: PreparedData,
    run_folder: Path,
) -> None:
    config = make_config(
        model={"ffn": {"type": "moe", "num_experts": 4}},
        trainer={"accelerator": "cpu", "max_steps": 4, "validate_every_n_steps": 2},
        logging={"every_n_steps": 1},
    )
    checkpoint = run_folder / "cut.ckpt"
    with pytest.raises(KilledError):
        _fit(config, prepared, run_folder, [KillAfterValidation(checkpoint)])
    _fit(config, prepared, run_folder, [], resume_from=checkpoint)

    folders = sorted((run_folder / "wandb").glob("offline-run-*"))
    first, second = [inspect(folder, dict(os.environ)) for folder in folders]
    ids = {r["run"]["run_id"] for r in [*first, *second] if r["type"] == "run"}
    assert len(ids) == 1
    rows = history([*first, *second])
    steps = {"train/loss": [1, 2, 3, 4], "validation/loss": [2, 4]}
    for key, expected in steps.items():
        assert [row["trainer/global_step"] for row in rows if key in row] == expected, key
    assert len(rows) == 4 + 2


def _fit(
    config: TrainConfig,
    data: PreparedData,
    folder: Path,
    callbacks: list[Callback],
    resume_from: Path | None = None,
) -> None:
    torch.manual_seed(0)
    module = build_module(config, data)
    logger, _ = wandb_logger(WandbConfig(mode="offline"), folder, [], {})
    assert logger is not None
    trainer = build_trainer(
        config, folder, "32-true", [logger], make_callbacks(config, data, folder)
    )
    trainer.callbacks.extend(callbacks)  # pyright: ignore[reportAttributeAccessIssue]
    try:
        trainer.fit(module, datamodule=make_token_data(config, data), ckpt_path=resume_from)
    finally:
        close([logger])
