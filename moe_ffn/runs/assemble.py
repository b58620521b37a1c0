"""The parts of a training run, made from its config: model, data, Trainer, callbacks, loggers."""

from __future__ import annotations

import logging
import os
import platform
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger

from moe_ffn.config.environment import check_number_of_processes, processes_here
from moe_ffn.config.errors import ConfigError, Situation, first_line
from moe_ffn.data.batches import require_equal_shares
from moe_ffn.data.prepare import PreparedData, validation_batches
from moe_ffn.parallel.layout import SHARDED_PRECISIONS, WHOLE, Layout
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.contract import check_outside_parts
from moe_ffn.runs.folder import (
    ALARMS_FILE,
    CHECKPOINTS_FOLDER,
    METRICS_FILE,
    SAMPLES_FILE,
    SAVED_FILE,
    git_revision,
)
from moe_ffn.runs.json_files import Saved
from moe_ffn.runs.outside_code import portable_options
from moe_ffn.runs.record import RUN_ID, checkpoint_identity, tokenizer_sha256
from moe_ffn.training.config import FASTEST, resolve_precision
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
from moe_ffn.training.recovery.checkpoint_keeper import CheckpointKeeper, KeptFiles
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
    kept: KeptFiles
    checkpoints: CheckpointKeeper
    stop: StopOnRequest
    profile: ProfileReport


LAUNCHED = ("MASTER_ADDR", "SLURM_NTASKS", "LSB_JOBID", "OMPI_COMM_WORLD_SIZE")
"""Variables of which torchrun, SLURM, LSF and MPI set at least one for the processes that they start."""


def check_trainer(config: TrainConfig) -> tuple[str, Layout]:
    """The precision to train in and the layout of the ranks, once Lightning has accepted its arguments.

    The precision is still `fastest` where that is to be timed.

    Raises:
        ConfigError: it refuses them, or they do not go with the rest of the config, or a part from outside
            the package does not keep its contract.
    """
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    arguments = lightning_arguments(config)
    num_nodes = config.trainer.num_nodes
    if num_nodes > 1 and not any(name in os.environ for name in LAUNCHED):
        raise ConfigError(
            f"trainer.num_nodes ({num_nodes}): nobody has started this program on the other machines, so "
            f"that it would wait for ever; start it on each with torchrun --nnodes {num_nodes} "
            "--nproc_per_node DEVICES --rdzv_backend c10d --rdzv_endpoint HOST:PORT -m experiments.train, or "
            "with srun"
        )
    try:
        trial = Trainer(**(quiet | arguments))
    except Exception as error:  # of whatever kind: what is wrong is in what was passed on
        given = "".join(f" {name}: {value}," for name, value in arguments.items()).rstrip(",")
        raise ConfigError(
            f"trainer: lightning.Trainer refuses{given}: {first_line(error)}"
        ) from error
    check_number_of_processes(trial.num_devices, trial.num_nodes)
    require_equal_shares(config.data.batch_size, trial.world_size)
    device = trial.strategy.root_device.type
    precision = resolve_precision(config.trainer.precision, device)
    if precision == "16-mixed" and device == "cpu":
        raise ConfigError("trainer.precision (16-mixed) needs a GPU; on a CPU use bf16-mixed")
    if precision == FASTEST and (trial.world_size > 1 or config.trainer.compile):
        beside = "trainer.compile" if config.trainer.compile else f"{trial.world_size} processes"
        raise ConfigError(
            f"trainer.precision (fastest) times eager steps in one process, which does not go with {beside}; "
            "use auto, 32-true or bf16-mixed"
        )
    layout = check_layout(config, trial.world_size, precision)
    check_outside_parts(config, trial.strategy.root_device)
    if refusal := config.model.refusal(Situation(device=device)):
        raise ConfigError(f"model.{refusal}")
    return precision, layout


def lightning_arguments(config: TrainConfig) -> dict[str, Any]:
    """What `lightning.Trainer` is told: of its options, and how many processes torchrun has started."""
    arguments = config.trainer.lightning_arguments()
    if config.trainer.devices == "auto" and (count := processes_here()):
        arguments["devices"] = count
    return arguments


def check_layout(config: TrainConfig, num_ranks: int, precision: str) -> Layout:
    """How the ranks of a run share its model.

    Raises:
        ConfigError: they cannot.
    """
    if config.parallel is None:
        return Layout(data=num_ranks)
    layout = config.parallel.layout(num_ranks)
    if layout.expert > 1 and not config.model.routers():
        raise ConfigError(
            f"parallel.expert ({layout.expert}) divides the experts that a router chooses from, but no layer "
            "has a router; use parallel.shard"
        )
    if refusal := config.model.refusal(Situation(num_ranks=layout.expert)):
        raise ConfigError(f"model.{refusal}")
    if layout.is_sharded and config.trainer.strategy != "auto":
        raise ConfigError(
            f"trainer.strategy ({config.trainer.strategy}) holds the whole model on each rank, but parallel "
            "divides it; leave one of them out"
        )
    if layout.is_sharded and precision not in SHARDED_PRECISIONS:
        raise ConfigError(
            f"trainer.precision ({precision}) does not go with parallel.shard and parallel.expert; use one "
            f"of {', '.join(SHARDED_PRECISIONS)}"
        )
    if layout.is_sharded and not config.optimizer.takes_shards:
        raise ConfigError(
            f"optimizer.type ({config.optimizer.type}) looks at whole matrices, which parallel.shard and "
            "parallel.expert divide; use adamw or muon"
        )
    if layout.expert > 1:
        empty = config.model.build_empty(*config.data.text_sizes)
        if reason := layout.refusal_of(empty):
            raise ConfigError(reason)
    return layout


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
    files: Mapping[str, str] | None = None,
    identity: Mapping[str, Any] | None = None,
) -> RunCallbacks:
    """Rows every few steps, a text at every validation, checkpoints, and an end when one is asked for.

    Args:
        files: what the run is begun with, to be put back where it is removed; nothing by default.
        identity: the `checkpoint_identity` of the run; by default that of a run without an id.
    """
    advice = Advice(config.model, config.objective, config.optimizer, config.trainer)
    rules = AlarmRules(config.logging.alarms, advice)
    kept = KeptFiles(folder, files or {})
    identity = identity or checkpoint_identity(config, data)

    def record(step: int) -> None:
        if SAVED_FILE in kept.files:
            kept.change(SAVED_FILE, Saved(run_id=identity[RUN_ID], last_saved_step=step).to_text())

    checkpoints = CheckpointKeeper(
        folder / CHECKPOINTS_FOLDER,
        config.checkpoints,
        config.trainer.validate_every_n_steps,
        identity,
        record,
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
        kept,
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
    given = lightning_arguments(config)
    if (max_time := given.pop("max_time", None)) is not None:
        callbacks.append(StepTimer(max_time))
    if layout.is_sharded:
        given["strategy"] = ShardedStrategy(layout.num_ranks)
    # Last, so that what is saved is what all the others have made of the step.
    callbacks += [run_callbacks.kept, run_callbacks.checkpoints, run_callbacks.stop]
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
    """What a run is filtered by later: its options, its code, its corpus and its size."""
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
