"""The real client in this process: a resumed run.

In whole runs of the program, it is in `tests/cli/test_train_wandb.py`.
"""

from __future__ import annotations

import os
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


@pytest.fixture
def real_wandb() -> Iterator[Any]:
    import wandb

    yield wandb
    wandb.teardown()


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
