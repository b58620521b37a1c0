"""One training run, from its options to its results."""

from __future__ import annotations

import json
import secrets
from collections.abc import Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from moe_ffn.config.environment import is_first_rank
from moe_ffn.config.import_path import explaining_custom_errors
from moe_ffn.config.process_memory import keep_freed_memory
from moe_ffn.config.trust import trust
from moe_ffn.config.yaml_files import to_yaml
from moe_ffn.data.prepare import PreparedData, prepare
from moe_ffn.kernels.native.build import compile_kernels
from moe_ffn.report.tables import describe_data, model_table
from moe_ffn.runs import assemble, custom_code
from moe_ffn.runs import folder as run_folder
from moe_ffn.runs.config import Resume, TrainConfig
from moe_ffn.runs.custom_parts import check_num_params
from moe_ffn.runs.resume import ResumePoint, find_resume_point, rewind
from moe_ffn.runs.texts import check_documents
from moe_ffn.runs.train.ending import TrainingRun, explaining_early_end, finish
from moe_ffn.runs.train.teacher import announce_teacher, read_teacher
from moe_ffn.runs.validate import require_valid
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.sampling import run_prompt
from moe_ffn.weights.init_from import fit_weights
from moe_ffn.weights.open_model import OpenModel, read_source


def run_training(config: TrainConfig, resume: Resume | None = None) -> Path:
    """Validate the options, prepare the data, build and train the model, and write the results.

    Returns the folder of the run, on the first rank. Without a run to `resume`, a new one starts.

    Raises:
        ConfigError: the options, the data or the folder cannot be used, and no new folder was made; or the
            run to resume has no intact checkpoint.
        TrainingError: a signal ended the run, it diverged, a rank was lost, or results could not be written.
        SystemExit: the run was interrupted or diverged, on another rank than the first.
    """
    console = Console(quiet=not is_first_rank(), highlight=False, markup=False, soft_wrap=True)
    assemble.quiet_libraries()

    hardware = require_valid(config, resume)
    source = None if resume else read_initial_weights(config)

    with explaining_custom_errors():
        data = prepare(config.data)
        run_prompt(config.sample, data, config.data.seq_len)  # raises before the folder is made
        teacher = read_teacher(config, data)
        torch.manual_seed(config.seed)
        module = assemble.build_module(config, data, hardware.layout)
        check_num_params(module.decoder)
    module.teacher = teacher
    console.print(model_table(config, data.tokenizer.vocab_size), soft_wrap=False)
    console.print(*config.notes(), f"\n{describe_data(data)}", sep="\n")

    with ExitStack() as stack:
        start = ResumePoint()
        if resume is not None:
            stack.enter_context(locked_by_first_rank(resume.folder))
            start = announce_resume_point(resume, data, module, console)
        if start.checkpoint is None:
            load_initial_weights(source or read_initial_weights(config), data, module, console)
        source = None  # frees the second copy of the weights
        console.print(f"precision {hardware.precision}")
        run_id = start.run_id or secrets.token_hex(8)
        teacher_sha256 = announce_teacher(teacher, config, resume, console)
        facts = assemble.run_facts(config, data, hardware.precision, run_id, teacher_sha256)
        files = initial_files(config, data, facts)
        folder = open_folder(config, resume, start, files)
        if resume is None:
            stack.enter_context(locked_by_first_rank(folder))

        loggers, wandb_line = [], ""
        if is_first_rank():
            loggers, wandb_line = assemble.make_loggers(config, folder, facts)
        layout_line = [hardware.layout.describe()] if hardware.layout.num_ranks > 1 else []
        code_lines = custom_code.describe_code(config, folder) if resume is None else ()
        console.print(*layout_line, wandb_line, *code_lines, f"writing to {folder}/\n", sep="\n")
        callbacks = assemble.make_callbacks(config, data, folder, run_id)
        trainer = assemble.build_trainer(
            config, folder, hardware.precision, loggers, callbacks, hardware.layout
        )
        if trainer.strategy.root_device.type == "cpu":
            compile_kernels()
            keep_freed_memory()

        run = TrainingRun(config, folder, data, module, trainer, callbacks, loggers, console)
        token_data = assemble.make_token_data(config, data)
        with explaining_early_end(run):
            trainer.fit(module, datamodule=token_data, ckpt_path=start.checkpoint)
            if callbacks.validation.last_step != trainer.global_step:
                trainer.validate(module, datamodule=token_data, verbose=False)
        if is_first_rank():
            finish(run)
    return folder


def read_initial_weights(config: TrainConfig) -> OpenModel | None:
    """Read the weights of `init_from`; None if it is not set."""
    return None if config.init_from is None else read_source(config.init_from, "init_from")


def load_initial_weights(
    source: OpenModel | None, data: PreparedData, module: LanguageModel, console: Console
) -> None:
    """Replace the random weights of a model by the weights of `init_from`, if it is set."""
    if source is not None:
        source.require_same_tokens(data.tokenizer)
        weights, lines = fit_weights(source, module.decoder)
        module.start_from(weights)
        console.print(*lines, sep="\n")


def locked_by_first_rank(folder: Path) -> AbstractContextManager[None]:
    """Lock the folder for all ranks; the first rank holds the lock."""
    return run_folder.locked(folder) if is_first_rank() else nullcontext()


def announce_resume_point(
    resume: Resume, data: PreparedData, module: LanguageModel, console: Console
) -> ResumePoint:
    """Find and print the step at which the run resumes, without changing a file; ConfigError if it cannot."""
    custom_code.warn_if_code_changed(resume.folder)
    check_documents(resume.folder, data.documents)
    trainer = resume.config.trainer
    start = find_resume_point(resume.folder, resume.saved, data, module, trainer)
    console.print(start.describe(resume.folder))
    for key, (before, now) in resume.changes.items():
        console.print(f"{key} is {json.dumps(now)} now (was {json.dumps(before)})")
    return start


def initial_files(
    config: TrainConfig, data: PreparedData, facts: Mapping[str, Any]
) -> dict[str, str]:
    """Return name -> text of the files of a new run: options, facts, tokenizer, documents, code."""
    return {
        run_folder.CONFIG_FILE: to_yaml(custom_code.portable_options(config)),
        run_folder.FACTS_FILE: json.dumps(facts, indent=2) + "\n",
        run_folder.TOKENIZER_FILE: json.dumps(data.tokenizer.to_dict()),
        run_folder.DOCUMENTS_FILE: json.dumps(data.documents.to_dict()),
        **custom_code.code_files(config),
    }


def open_folder(
    config: TrainConfig, resume: Resume | None, start: ResumePoint, files: Mapping[str, str]
) -> Path:
    """Make the folder of a new run, or rewind the folder of a resumed run to its checkpoint.

    Only the first rank writes; for a new run, the other ranks get `run.output_dir`.
    """
    if not is_first_rank():
        return Path(config.run.output_dir) if resume is None else resume.folder
    if resume is not None:
        rewind(resume, start, files)
        return resume.folder
    folder = run_folder.make_run_folder(config, files)
    trust(custom_code.named_code(config))
    return folder
