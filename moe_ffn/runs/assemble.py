"""The parts of a training run, built from its config: model, data, Trainer, callbacks, loggers."""

from __future__ import annotations

import logging
import os
import platform
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from moe_ffn.data.prepare import PreparedData, validation_batches
from moe_ffn.parallel.layout import WHOLE, Layout
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import (
    ALARMS_FILE,
    CHECKPOINTS_FOLDER,
    METRICS_FILE,
    SAMPLES_FILE,
    git_revision,
)
from moe_ffn.runs.identity import RUN_ID, checkpoint_identity, tokenizer_sha256
from moe_ffn.runs.outside_code import portable_options
from moe_ffn.training.data_module import TokenData
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.monitoring.alarms import Advice, AlarmLog, AlarmRules
from moe_ffn.training.monitoring.callbacks import (
    ProfileReport,
    SampleLog,
    StepLogger,
    ValidationLogger,
)
from moe_ffn.training.monitoring.hardware import describe_hardware
from moe_ffn.training.monitoring.loggers import MetricsFile, wandb_logger
from moe_ffn.training.monitoring.progress import progress_display
from moe_ffn.training.recovery.checkpoint_keeper import CheckpointKeeper
from moe_ffn.training.recovery.stopping import (
    EarlyStoppingByOptions,
    StepTimer,
    StopOnRequest,
    StopRequest,
    ending_at_once,
)
from moe_ffn.training.sampling import run_prompt
from moe_ffn.training.strategy import ShardedStrategy


@dataclass(frozen=True)
class RunCallbacks:
    """The callbacks whose results are read after training."""

    samples: SampleLog
    steps: StepLogger
    validation: ValidationLogger
    checkpoints: CheckpointKeeper
    stop: StopOnRequest
    profile: ProfileReport

    @property
    def saved(self) -> tuple[Callback, ...]:
        """The callbacks whose state a checkpoint holds."""
        return self.samples, self.steps, self.validation, self.checkpoints


def build_module(config: TrainConfig, data: PreparedData, layout: Layout = WHOLE) -> LanguageModel:
    """The model with fresh weights, for ranks of this layout; seed torch before."""
    return LanguageModel(
        config.model,
        config.optimizer,
        config.objective,
        config.trainer.guard,
        byte_lengths=torch.tensor(data.tokenizer.byte_lengths),
        max_seq_len=config.data.seq_len,
        max_steps=config.trainer.max_steps,
        seed=config.seed,
        layout=layout,
        compiles=config.trainer.compile,
    )


def make_token_data(config: TrainConfig, data: PreparedData) -> TokenData:
    """The run's batches, in the order of its seed."""
    return TokenData(
        config.data,
        data,
        num_batches=config.trainer.max_steps * config.trainer.accumulate_grad_batches,
        seed=config.seed,
    )


def make_callbacks(
    config: TrainConfig,
    data: PreparedData,
    folder: Path,
    run_id: str | None = None,
) -> RunCallbacks:
    """Make what logs rows, samples, validates, saves, and ends a run early.

    Args:
        run_id: id that every checkpoint holds.
    """
    advice = Advice(config.model, config.objective, config.optimizer, config.trainer)
    rules = AlarmRules(config.logging.alarms, advice)
    checkpoints = CheckpointKeeper(
        folder / CHECKPOINTS_FOLDER,
        config.checkpoints,
        config.trainer.validate_every_n_steps,
        checkpoint_identity(config, data, run_id),
    )
    return RunCallbacks(
        SampleLog(
            folder / SAMPLES_FILE,
            data.tokenizer,
            config.sample,
            run_prompt(config.sample, data, config.data.seq_len),
            config.seed,
        ),
        StepLogger(config.logging, rules, AlarmLog(folder / ALARMS_FILE)),
        ValidationLogger(),
        checkpoints,
        StopOnRequest(StopRequest(), checkpoints),
        ProfileReport(),
    )


def build_trainer(
    config: TrainConfig,
    folder: Path,
    precision: str,
    loggers: list[Logger],
    run_callbacks: RunCallbacks,
    layout: Layout = WHOLE,
) -> Trainer:
    """Lightning's Trainer, for ranks of this layout; its own prints and progress are off: we have others."""
    options = config.trainer
    callbacks: list[Callback] = [
        run_callbacks.samples,  # before the clock of `steps` starts again
        run_callbacks.steps,
        run_callbacks.validation,
        progress_display(run_callbacks.steps, run_callbacks.validation),
        run_callbacks.profile,
    ]
    if options.early_stopping is not None:
        stopping = options.early_stopping
        callbacks.append(
            EarlyStoppingByOptions(
                "validation/loss", patience=stopping.patience, min_delta=stopping.min_delta
            )
        )
    given = options.lightning_arguments()
    if (max_time := given.pop("max_time", None)) is not None:
        callbacks.append(StepTimer(max_time))
    if layout.is_sharded:
        given["strategy"] = ShardedStrategy(layout.num_ranks)
    # Last, so that what is saved is what all the others have made of the step.
    callbacks += [run_callbacks.checkpoints, run_callbacks.stop]
    arguments: dict[str, Any] = {
        "max_steps": options.max_steps,
        "max_epochs": -1,
        "accumulate_grad_batches": options.accumulate_grad_batches,
        "gradient_clip_val": options.gradient_clip_val or None,
        "precision": precision,
        "val_check_interval": options.validate_every_n_steps * options.accumulate_grad_batches,
        "check_val_every_n_epoch": None,
        "callbacks": callbacks,
        "plugins": [run_callbacks.checkpoints.io],
        "enable_checkpointing": False,  # Lightning's own; `checkpoints` is ours
        "logger": loggers,
        "default_root_dir": str(folder),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "use_distributed_sampler": False,
    }
    trainer = Trainer(**(arguments | given))
    if layout.num_ranks > 1:
        meet: Any = trainer.strategy.setup_environment
        place = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        others = (
            f"the other processes of {layout.num_ranks} at {place.strip(':') or 'this machine'}"
        )

        def meet_or_end() -> None:
            with ending_at_once(others):
                meet()

        trainer.strategy.setup_environment = meet_or_end
    return trainer


def make_loggers(
    config: TrainConfig, folder: Path, facts: dict[str, Any]
) -> tuple[list[Logger], str]:
    """The log of rows and, unless off, wandb's, with a line on what became of wandb."""
    tags = sorted({*ffn_types(config), *config.logging.wandb.tags})
    wandb, line = wandb_logger(config.logging.wandb, folder, tags, facts)
    loggers: list[Logger] = [MetricsFile(folder / METRICS_FILE)]
    return loggers if wandb is None else [*loggers, wandb], line


def ffn_types(config: TrainConfig) -> list[str]:
    """The types of the feed-forward blocks, each once, in alphabetical order; of a file, its name alone."""
    return sorted({ffn.type.rpartition("/")[2] for ffn in config.model.layer_ffns()})


def run_facts(
    config: TrainConfig, data: PreparedData, precision: str, run_id: str = ""
) -> dict[str, Any]:
    """Return the facts that runs are filtered by: options, code revision, corpus and size."""
    vocab_size, seq_len = data.tokenizer.vocab_size, config.data.seq_len
    d_model, ffns = config.model.d_model, config.model.layer_ffns()
    return {
        **portable_options(config),
        "ffn_type": "+".join(ffn_types(config)),
        RUN_ID: run_id,
        "git_revision": git_revision(),
        "corpus_sha256": data.corpus_sha256,
        "tokenizer_sha256": tokenizer_sha256(data.tokenizer.to_dict()),
        "validation_sha256": validation_batches(config.data, data).sha256,
        "precision": precision,
        "num_threads": torch.get_num_threads(),
        "num_params": config.model.num_params(vocab_size, seq_len),
        "num_active_params": config.model.num_active_params(vocab_size, seq_len),
        "flops_per_token": config.model.flops_per_token(vocab_size, seq_len),
        "ffn_params": sum(ffn.num_params(d_model) for ffn in ffns),
        "ffn_active_params": sum(ffn.num_active_params(d_model) for ffn in ffns),
        "ffn_flops_per_token": sum(ffn.flops_per_token(d_model, seq_len) for ffn in ffns),
        "hardware": describe_hardware(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def quiet_libraries() -> None:
    """Keep notices that a person can do nothing about off the screen."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in (
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        ".*does not have many workers",
        "Be aware that when using `ckpt_path`",  # of an early stopping that is given up
        "Experiment logs directory .* exists and is not empty",
        "It is recommended to use `self.log\\('validation/",  # of one rank alone, which torchrun started
    ):
        warnings.filterwarnings("ignore", message=message)
