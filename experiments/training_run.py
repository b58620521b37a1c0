"""One training run, from prepared data to the report at its end."""

from __future__ import annotations

import json
import math
from pathlib import Path

import torch
from lightning import Trainer
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from rich.console import Console

from experiments.assemble import (
    RunCallbacks,
    build_module,
    build_trainer,
    check_trainer,
    make_callbacks,
    make_loggers,
    make_token_data,
    quiet_libraries,
    run_facts,
)
from experiments.command_line import to_yaml
from experiments.config import TrainConfig
from experiments.report import Report
from experiments.run_folder import (
    BEST_CHECKPOINT,
    CONFIG_FILE,
    LAST_CHECKPOINT,
    TOKENIZER_FILE,
    check_run_folder,
    make_run_folder,
)
from experiments.sampling import sample_text
from experiments.tables import describe_data, model_table
from moe_ffn.data.prepare import PreparedData, prepare
from moe_ffn.data.unigram import unigram_loss
from moe_ffn.training.data_module import TokenData, validation_batches
from moe_ffn.training.loggers import close
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.precision import resolve_precision


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

    run_callbacks = make_callbacks(config, folder)
    trainer = build_trainer(config, folder, precision, loggers, run_callbacks)
    token_data = make_token_data(config, data)
    if config.trainer.compile:
        module.decoder.compile()
    try:
        trainer.fit(module, datamodule=token_data)
    except SystemExit:  # Lightning's answer to Ctrl-C
        console.print(f"interrupted at step {trainer.global_step}; what was saved is in {folder}/")
        raise
    finish_validation(trainer, module, token_data, run_callbacks, folder)
    if is_main:
        report = make_report(config, data, module, run_callbacks, unigram, folder)
        report.write()
        report.print(console)
    close(loggers)


def finish_validation(
    trainer: Trainer,
    module: LanguageModel,
    token_data: TokenData,
    run_callbacks: RunCallbacks,
    folder: Path,
) -> None:
    """Validate the final weights if the last validation is older, and save them."""
    if run_callbacks.validation.last_step != trainer.global_step:
        trainer.validate(module, datamodule=token_data, verbose=False)
        best_score = run_callbacks.best.best_model_score
        if best_score is None or run_callbacks.validation.last["loss"] < float(best_score):
            trainer.save_checkpoint(folder / BEST_CHECKPOINT)
    trainer.save_checkpoint(folder / LAST_CHECKPOINT)


def make_report(
    config: TrainConfig,
    data: PreparedData,
    module: LanguageModel,
    run_callbacks: RunCallbacks,
    unigram: float,
    folder: Path,
) -> Report:
    loss = run_callbacks.validation.last["loss"]
    return Report(
        folder=folder,
        loss=loss,
        bits_per_byte=run_callbacks.validation.last["bits_per_byte"],
        unigram_loss=unigram,
        tokens_per_second=run_callbacks.steps.tokens_per_second,
        routing=run_callbacks.validation.routing,
        # A model that has diverged has no probabilities to draw from.
        sample=sample_text(module.decoder, data.tokenizer, config.sample, config.seed)
        if math.isfinite(loss)
        else "",
        sample_prompt=config.sample.prompt,
    )


def unigram_loss_of(config: TrainConfig, data: PreparedData) -> float:
    """Nats per token of the unigram model of the train split, on what validation looks at."""
    targets = validation_batches(config.data, data).targets
    return unigram_loss(data.train, targets, data.tokenizer.vocab_size)
