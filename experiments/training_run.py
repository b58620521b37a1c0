"""One training run, from prepared data to the results at its end."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

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
from experiments.exit import EXIT_DIVERGED, EXIT_INTERRUPTED
from experiments.report.page import REPORT_FILE, write_report
from experiments.results import Results, say_diverged
from experiments.run_folder import (
    BEST_CHECKPOINT,
    CONFIG_FILE,
    FACTS_FILE,
    LAST_CHECKPOINT,
    TOKENIZER_FILE,
    check_run_folder,
    make_run_folder,
)
from experiments.tables import describe_data, model_table
from moe_ffn.data.prepare import PreparedData, prepare
from moe_ffn.data.unigram import unigram_loss
from moe_ffn.errors import first_line
from moe_ffn.training.data_module import TokenData, validation_batches
from moe_ffn.training.guard import Diverged
from moe_ffn.training.loggers import close
from moe_ffn.training.module import LanguageModel


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
    precision = check_trainer(config)
    data = prepare(config.data, progress=is_main)
    torch.manual_seed(config.seed)
    module = build_module(config, data)
    console.print(model_table(config, vocab_size=data.tokenizer.vocab_size))
    console.print(f"\n{describe_data(data)}", highlight=False, soft_wrap=True)

    folder = Path(config.run.output_dir)
    loggers: list[Logger] = []
    if is_main:
        folder = make_run_folder(config)
        facts = run_facts(config, data, precision)
        write_run_files(config, data, facts, folder)
        loggers, wandb_line = make_loggers(config, folder, facts)
        for line in (f"precision {precision}", wandb_line, f"writing to {folder}/\n"):
            console.print(line, highlight=False, soft_wrap=True)

    callbacks = make_callbacks(config, data, folder)
    trainer = build_trainer(config, folder, precision, loggers, callbacks)
    token_data = make_token_data(config, data)
    if config.trainer.compile:
        module.decoder.compile()
    status = "failed"
    try:
        trainer.fit(module, datamodule=token_data)
        finish_validation(trainer, module, token_data, callbacks, folder)
        status = "success"
    except SystemExit:  # Lightning's answer to Ctrl-C
        console.print(f"interrupted at step {trainer.global_step}; what was saved is in {folder}/")
        raise SystemExit(EXIT_INTERRUPTED) from None
    except Diverged as error:
        if is_main:
            say_diverged(error, config, folder)
        raise SystemExit(EXIT_DIVERGED) from None
    finally:
        try:
            close(loggers, status)
        finally:
            if is_main and status == "failed":
                add_report(folder)
    if is_main:
        results = make_results(config, data, callbacks, folder)
        results.write()
        add_report(folder)
        results.print(console)


def write_run_files(
    config: TrainConfig, data: PreparedData, facts: dict[str, Any], folder: Path
) -> None:
    """What the run was, before its first step: options, facts and tokenizer."""
    (folder / CONFIG_FILE).write_text(to_yaml(config), encoding="utf-8")
    (folder / FACTS_FILE).write_text(json.dumps(facts, indent=2) + "\n", encoding="utf-8")
    tokenizer = json.dumps(data.tokenizer.to_dict())
    (folder / TOKENIZER_FILE).write_text(tokenizer, encoding="utf-8")


def add_report(folder: Path) -> None:
    """The run, which has ended, as a page, `report.html`; one line where that cannot be made."""
    try:
        write_report([folder], folder / REPORT_FILE, has_ended=True)
    except Exception as error:  # of any kind: a run is not to be lost to its page
        print(f"{REPORT_FILE}: {first_line(error)}", file=sys.stderr)


def finish_validation(
    trainer: Trainer,
    module: LanguageModel,
    token_data: TokenData,
    callbacks: RunCallbacks,
    folder: Path,
) -> None:
    """Validate the final weights if the last validation is older, and save them."""
    if callbacks.validation.last_step != trainer.global_step:
        trainer.validate(module, datamodule=token_data, verbose=False)
        best_score = callbacks.best.best_model_score
        if best_score is None or callbacks.validation.last["loss"] < float(best_score):
            trainer.save_checkpoint(folder / BEST_CHECKPOINT)
    trainer.save_checkpoint(folder / LAST_CHECKPOINT)


def make_results(
    config: TrainConfig,
    data: PreparedData,
    callbacks: RunCallbacks,
    folder: Path,
) -> Results:
    return Results(
        folder=folder,
        loss=callbacks.validation.last["loss"],
        bits_per_byte=callbacks.validation.last["bits_per_byte"],
        unigram_loss=unigram_loss_of(config, data),
        tokens_per_second=callbacks.steps.tokens_per_second,
        num_alarms=callbacks.steps.bell.num_alarms,
        num_skipped_steps=callbacks.steps.num_skipped,
        routing=callbacks.validation.routing,
        sample=callbacks.samples.last,
        sample_prompt=config.sample.prompt,
    )


def unigram_loss_of(config: TrainConfig, data: PreparedData) -> float:
    """Nats per token of the unigram model of the train split, on what validation looks at."""
    targets = validation_batches(config.data, data).targets
    return unigram_loss(data.train, targets, data.tokenizer.vocab_size)
