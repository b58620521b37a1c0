"""One training run, from prepared data to the report at its end."""

from __future__ import annotations

import json
import logging
import math
import platform
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from lightning import Trainer
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console

from experiments.command_line import to_yaml
from experiments.config import TrainConfig
from experiments.report import Report
from experiments.run_folder import (
    BEST_CHECKPOINT,
    CONFIG_FILE,
    LAST_CHECKPOINT,
    TOKENIZER_FILE,
    check_run_folder,
    git_revision,
    make_run_folder,
)
from experiments.sampling import sample_text
from experiments.tables import describe_data, model_table
from moe_ffn.data.prepare import PreparedData, prepare
from moe_ffn.data.unigram import unigram_loss
from moe_ffn.errors import ConfigError
from moe_ffn.training.callbacks import StepLogger, ValidationLogger
from moe_ffn.training.data_module import TokenData, validation_batches
from moe_ffn.training.loggers import close, csv_logger, wandb_logger
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.precision import resolve_precision
from moe_ffn.training.progress import progress_display


@dataclass(frozen=True)
class Watchers:
    """The callbacks whose results are read after training."""

    steps: StepLogger
    validation: ValidationLogger
    best: ModelCheckpoint


def train(config: TrainConfig) -> None:
    """Prepare the data, train, and print what came of it.

    Raises:
        ConfigError: the data or the output folder cannot be used; no run folder was made then.
    """
    quiet_libraries()
    is_main = getattr(rank_zero_only, "rank", 0) == 0
    console = Console(quiet=not is_main)
    if is_main:
        check_run_folder(config)
    check_trainer(config)
    data = prepare(config.data, progress=is_main)
    torch.manual_seed(config.seed)
    module = build_module(config, data)
    unigram = unigram_loss_of(config, data)
    console.print(model_table(config, vocab_size=data.tokenizer.vocab_size))

    folder = make_run_folder(config) if is_main else Path(config.run.output_dir)
    precision = resolve_precision(config.trainer.precision)
    loggers: list[Logger] = []
    wandb_line = ""
    if is_main:
        (folder / CONFIG_FILE).write_text(to_yaml(config), encoding="utf-8")
        tokenizer = json.dumps(data.tokenizer.to_dict())
        (folder / TOKENIZER_FILE).write_text(tokenizer, encoding="utf-8")
        facts = run_facts(config, data, precision)
        loggers, wandb_line = make_loggers(config, folder, facts)
    console.print(f"\n{describe_data(data)}", highlight=False)
    console.print(f"precision {precision}; {wandb_line}\nwriting to {folder}/\n", highlight=False)

    watchers = make_watchers(config, folder)
    trainer = build_trainer(config, folder, precision, loggers, watchers)
    token_data = make_token_data(config, data)
    if config.trainer.compile:
        module.decoder.compile()
    trainer.fit(module, datamodule=token_data)
    finish_validation(trainer, module, token_data, watchers, folder)
    if is_main:
        report = make_report(config, data, module, watchers, unigram, folder)
        report.write()
        report.print(console)
    close(loggers)


def build_module(config: TrainConfig, data: PreparedData) -> LanguageModel:
    """The model with fresh weights; seed torch before."""
    return LanguageModel(
        config.model,
        config.optimizer,
        config.objective,
        byte_lengths=torch.tensor(data.tokenizer.byte_lengths),
        max_seq_len=config.data.seq_len,
        max_steps=config.trainer.max_steps,
        seed=config.seed,
    )


def make_token_data(config: TrainConfig, data: PreparedData) -> TokenData:
    """The run's batches, in the order of its seed."""
    return TokenData(
        config.data,
        data,
        num_batches=config.trainer.max_steps * config.trainer.accumulate_grad_batches,
        seed=config.seed,
    )


def build_trainer(
    config: TrainConfig,
    folder: Path,
    precision: str,
    loggers: list[Logger],
    watchers: Watchers,
) -> Trainer:
    """Lightning's Trainer, with its own prints and progress off: this program has its own."""
    options = config.trainer
    callbacks: list[Callback] = [
        watchers.steps,
        watchers.validation,
        watchers.best,
        progress_display(watchers.steps),
    ]
    if options.early_stopping is not None:
        stopping = options.early_stopping
        callbacks.append(
            EarlyStopping(
                "validation/loss", patience=stopping.patience, min_delta=stopping.min_delta
            )
        )
    arguments: dict[str, Any] = {
        "max_steps": options.max_steps,
        "max_epochs": -1,
        "accumulate_grad_batches": options.accumulate_grad_batches,
        "gradient_clip_val": options.gradient_clip_val or None,
        "precision": precision,
        "val_check_interval": options.validate_every_n_steps * options.accumulate_grad_batches,
        "check_val_every_n_epoch": None,
        "callbacks": callbacks,
        "logger": loggers,
        "default_root_dir": str(folder),
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "num_sanity_val_steps": 0,
        "log_every_n_steps": 1,
        "use_distributed_sampler": False,
    }
    return Trainer(**(arguments | options.lightning_arguments()))


def check_trainer(config: TrainConfig) -> None:
    """ConfigError where Lightning refuses its arguments, or they do not go with the rest."""
    quiet: dict[str, Any] = {
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    try:
        trial = Trainer(**(quiet | config.trainer.lightning_arguments()))
    except Exception as error:  # of whatever kind: what is wrong is in what was passed on
        given = ", ".join(f"{k}: {v}" for k, v in config.trainer.lightning_arguments().items())
        raise ConfigError(
            f"trainer: lightning.Trainer refuses {given}: {_first_line(error)}"
        ) from error
    if trial.limit_val_batches == 0:
        raise ConfigError(
            "trainer.limit_val_batches (0): a run always ends with a validation; to have only that "
            "one, set trainer.validate_every_n_steps to trainer.max_steps"
        )
    if config.data.batch_size % trial.world_size:
        raise ConfigError(
            f"data.batch_size ({config.data.batch_size}) must be divisible by the number of ranks "
            f"({trial.world_size}): it counts the sequences of all ranks together"
        )


def _first_line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)


def make_watchers(config: TrainConfig, folder: Path) -> Watchers:
    best = ModelCheckpoint(
        dirpath=(folder / BEST_CHECKPOINT).parent,
        filename=Path(BEST_CHECKPOINT).stem,
        monitor="validation/loss",
        save_on_exception=False,
        enable_version_counter=False,
    )
    return Watchers(StepLogger(config.logging.every_n_steps), ValidationLogger(), best)


def finish_validation(
    trainer: Trainer,
    module: LanguageModel,
    token_data: TokenData,
    watchers: Watchers,
    folder: Path,
) -> None:
    """Validate the final weights if the last validation is older, and save them."""
    if watchers.validation.last_step != trainer.global_step:
        trainer.validate(module, datamodule=token_data, verbose=False)
        best_score = watchers.best.best_model_score
        if best_score is None or watchers.validation.last["loss"] < float(best_score):
            trainer.save_checkpoint(folder / BEST_CHECKPOINT)
    trainer.save_checkpoint(folder / LAST_CHECKPOINT)


def unigram_loss_of(config: TrainConfig, data: PreparedData) -> float:
    """Nats per token of the unigram model of the train split, on what validation looks at."""
    targets = [batch.target_ids.numpy().ravel() for batch in validation_batches(config.data, data)]
    return unigram_loss(data.train, np.concatenate(targets), data.tokenizer.vocab_size)


def run_facts(config: TrainConfig, data: PreparedData, precision: str) -> dict[str, Any]:
    """What a run is filtered by later: its options, its code, its corpus and its size."""
    vocab_size, seq_len = data.tokenizer.vocab_size, config.data.seq_len
    return {
        **config.to_dict(),
        "git_revision": git_revision(),
        "corpus_sha256": data.corpus_sha256,
        "precision": precision,
        "num_params": config.model.num_params(vocab_size, seq_len),
        "num_active_params": config.model.num_active_params(vocab_size, seq_len),
        "flops_per_token": config.model.flops_per_token(vocab_size, seq_len),
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
    }


def make_loggers(
    config: TrainConfig, folder: Path, facts: dict[str, Any]
) -> tuple[list[Logger], str]:
    """The CSV logger and, unless off, wandb's, with a line on what became of wandb."""
    tags = sorted({ffn.type for ffn in config.model.layer_ffns()} | set(config.logging.wandb.tags))
    wandb, line = wandb_logger(config.logging.wandb, folder, tags, facts)
    loggers: list[Logger] = [csv_logger(folder)]
    return loggers if wandb is None else [*loggers, wandb], line


def make_report(
    config: TrainConfig,
    data: PreparedData,
    module: LanguageModel,
    watchers: Watchers,
    unigram: float,
    folder: Path,
) -> Report:
    loss = watchers.validation.last["loss"]
    return Report(
        folder=folder,
        loss=loss,
        bits_per_byte=watchers.validation.last["bits_per_byte"],
        unigram_loss=unigram,
        tokens_per_second=watchers.steps.tokens_per_second,
        routing=watchers.validation.routing,
        # A model that has diverged has no probabilities to draw from.
        sample=write_sample(config, data, module) if math.isfinite(loss) else "",
        sample_prompt=config.sample.prompt,
    )


def write_sample(config: TrainConfig, data: PreparedData, module: LanguageModel) -> str:
    options = config.sample
    return sample_text(
        module.decoder,
        data.tokenizer,
        options.prompt,
        num_tokens=options.num_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        seed=config.seed,
    )


def quiet_libraries() -> None:
    """Keep notices that a person can do nothing about off the screen."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for message in (
        "`isinstance\\(treespec, LeafSpec\\)` is deprecated",
        ".*does not have many workers",
        "Experiment logs directory .* exists and is not empty",
        "You are using `torch.load` with `weights_only=False`",
    ):
        warnings.filterwarnings("ignore", message=message)
