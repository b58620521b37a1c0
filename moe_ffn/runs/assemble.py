"""Builds the parts of a training run from its config: model, data, Trainer, callbacks, loggers."""

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
from moe_ffn.runs.budget import Budget
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.custom_code import portable_options
from moe_ffn.runs.folder import (
    ALARMS_FILE,
    CHECKPOINTS_FOLDER,
    METRICS_FILE,
    SAMPLES_FILE,
    git_revision,
)
from moe_ffn.runs.identity import RUN_ID, checkpoint_identity, tokenizer_sha256
from moe_ffn.training.data_module import TokenData
from moe_ffn.training.module import LanguageModel, ModuleOptions
from moe_ffn.training.monitoring.alarms import Advice, AlarmRules
from moe_ffn.training.monitoring.callbacks import (
    ProfileReport,
    SampleLog,
    StepLogger,
    ValidationLogger,
)
from moe_ffn.training.monitoring.hardware import describe_hardware
from moe_ffn.training.monitoring.loggers import AlarmLog, MetricsFile, wandb_logger
from moe_ffn.training.monitoring.progress import progress_display
from moe_ffn.training.parallel.layout import SINGLE_PROCESS, Layout
from moe_ffn.training.recovery.checkpoint_keeper import CheckpointKeeper
from moe_ffn.training.recovery.stopping import (
    ResumableEarlyStopping,
    SignalListener,
    StepTimer,
    StopOnRequest,
    ending_at_once,
)
from moe_ffn.training.sampling import run_prompt
from moe_ffn.training.strategy import ShardedStrategy


@dataclass(frozen=True)
class RunCallbacks:
    """Callbacks whose results are read after training."""

    samples: SampleLog
    steps: StepLogger
    validation: ValidationLogger
    checkpoints: CheckpointKeeper
    stop: StopOnRequest
    profile: ProfileReport

    @property
    def saved(self) -> tuple[Callback, ...]:
        """Callbacks whose state a checkpoint holds."""
        return self.samples, self.steps, self.validation, self.checkpoints


def build_module(
    config: TrainConfig, data: PreparedData, layout: Layout = SINGLE_PROCESS
) -> LanguageModel:
    """Return the model for ranks of this layout, with new weights that depend on torch's global seed."""
    options = ModuleOptions(
        config.model,
        config.optimizer,
        config.objective,
        config.trainer.guard,
        config.data.seq_len,
        config.trainer.max_steps,
        config.seed,
        config.trainer.compile,
    )
    return LanguageModel(options, torch.tensor(data.tokenizer.byte_lengths), layout)


def make_token_data(config: TrainConfig, data: PreparedData) -> TokenData:
    """Return the batches of a run, shuffled by its seed."""
    return TokenData(
        config.data,
        data,
        num_batches=config.trainer.max_steps * config.trainer.accumulate_grad_batches,
        seed=config.seed,
    )


def make_callbacks(
    config: TrainConfig, data: PreparedData, folder: Path, run_id: str | None = None
) -> RunCallbacks:
    """Return the callbacks that log, sample, save (with the id of the run), and end a run early."""
    advice = Advice(config.model, config.objective, config.optimizer, config.trainer)
    routers = {name: info.router for name, info in config.model.router_infos().items()}
    num_always = {name: getattr(router, "num_always", 0) for name, router in routers.items()}
    rules = AlarmRules(config.logging.alarms, advice, num_always)
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
        StopOnRequest(SignalListener(), checkpoints),
        ProfileReport(),
    )


def build_trainer(
    config: TrainConfig,
    folder: Path,
    precision: str,
    loggers: list[Logger],
    run_callbacks: RunCallbacks,
    layout: Layout = SINGLE_PROCESS,
) -> Trainer:
    """Return Lightning's Trainer for ranks of this layout, without Lightning's own progress display."""
    options = config.trainer
    callbacks: list[Callback] = [
        run_callbacks.samples,  # before `steps`, which counts their seconds as validation
        run_callbacks.steps,
        run_callbacks.validation,
        progress_display(run_callbacks.steps, run_callbacks.validation),
        run_callbacks.profile,
    ]
    if options.early_stopping is not None:
        stopping = options.early_stopping
        callbacks.append(
            ResumableEarlyStopping(
                "validation/loss", patience=stopping.patience, min_delta=stopping.min_delta
            )
        )
    user_arguments = options.lightning_arguments()
    if (max_time := user_arguments.pop("max_time", None)) is not None:
        callbacks.append(StepTimer(max_time))
    if layout.is_sharded:
        user_arguments["strategy"] = ShardedStrategy(layout.num_ranks)
    # Last, so that a checkpoint holds the state of all other callbacks after the step.
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
        "enable_checkpointing": False,  # `CheckpointKeeper` replaces Lightning's callback
        "logger": loggers,
        "default_root_dir": str(folder),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "use_distributed_sampler": False,
    }
    trainer = Trainer(**(arguments | user_arguments))
    if layout.num_ranks > 1:
        setup_environment: Any = trainer.strategy.setup_environment
        address = ":".join(os.environ.get(name, "") for name in ("MASTER_ADDR", "MASTER_PORT"))
        address = address.strip(":") or "this machine"

        def setup_or_end() -> None:
            with ending_at_once(f"the other processes of {layout.num_ranks} at {address}"):
                setup_environment()

        trainer.strategy.setup_environment = setup_or_end
    return trainer


def make_loggers(
    config: TrainConfig, folder: Path, facts: dict[str, Any]
) -> tuple[list[Logger], str]:
    """Return loggers for metrics.jsonl and, unless it is off, wandb; and a line about the state of wandb."""
    tags = sorted({*ffn_types(config), *config.logging.wandb.tags})
    wandb, line = wandb_logger(config.logging.wandb, folder, tags, facts)
    loggers: list[Logger] = [MetricsFile(folder / METRICS_FILE)]
    return loggers if wandb is None else [*loggers, wandb], line


def ffn_types(config: TrainConfig) -> list[str]:
    """Return the distinct types of the feed-forward blocks, sorted; a custom type has no folder."""
    return sorted({ffn.type.rpartition("/")[2] for ffn in config.model.layer_ffns()})


def run_facts(
    config: TrainConfig,
    data: PreparedData,
    precision: str,
    run_id: str = "",
    teacher_sha256: str | None = None,
) -> dict[str, Any]:
    """Return the facts of a run for `facts.json` and wandb: options, code revision, data, sizes, hardware."""
    budget = Budget.of(config, data.tokenizer.vocab_size)
    return {
        **portable_options(config),
        "ffn_type": "+".join(ffn_types(config)),
        RUN_ID: run_id,
        "git_revision": git_revision(),
        "corpus_sha256": data.corpus_sha256,
        "tokenizer_sha256": tokenizer_sha256(data.tokenizer.to_dict()),
        "validation_sha256": validation_batches(config.data, data).sha256,
        "teacher_sha256": teacher_sha256,
        "precision": precision,
        "num_threads": torch.get_num_threads(),
        "num_params": budget.model.params,
        "num_active_params": budget.model.active_params,
        "flops_per_token": budget.model.flops_per_token,
        "ffn_params": budget.ffn.params,
        "ffn_active_params": budget.ffn.active_params,
        "ffn_flops_per_token": budget.ffn.flops_per_token,
        "hardware": describe_hardware(),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def quiet_libraries() -> None:
    """Hide notices from libraries that a user cannot act on."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in (
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        ".*does not have many workers",
        "Be aware that when using `ckpt_path`",  # if a resumed run no longer uses early stopping
        "Experiment logs directory .* exists and is not empty",
        "It is recommended to use `self.log\\('validation/",  # if torchrun has started a single rank
    ):
        warnings.filterwarnings("ignore", message=message)
