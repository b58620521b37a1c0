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
from moe_ffn.config.errors import ConfigError, expand_path
from moe_ffn.config.import_path import explaining_custom_errors
from moe_ffn.config.option_tree import show_value
from moe_ffn.config.process_memory import keep_freed_memory
from moe_ffn.config.trust import trust
from moe_ffn.config.yaml_files import to_yaml
from moe_ffn.data.prepare import PreparedData, prepare
from moe_ffn.kernels.native.build import compile_kernels
from moe_ffn.model.decoder import Decoder
from moe_ffn.report.tables import describe_data, model_table
from moe_ffn.runs import assemble, custom_code
from moe_ffn.runs import folder as run_folder
from moe_ffn.runs.config import Resume, TrainConfig
from moe_ffn.runs.custom_parts import check_num_params
from moe_ffn.runs.json_files import Facts
from moe_ffn.runs.memory import check_fits
from moe_ffn.runs.resume import ResumePoint, find_resume_point, rewind
from moe_ffn.runs.texts import check_documents
from moe_ffn.runs.train.ending import TrainingRun, explaining_early_end, finish
from moe_ffn.runs.validate import require_valid
from moe_ffn.training.distillation import DistillConfig, StoredAnswers
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.recovery.guard import nonfinite_name
from moe_ffn.training.sampling import run_prompt
from moe_ffn.weights.init_from import Source, fit_weights, read_source, sha256_of_weights


def train(config: TrainConfig, resume: Resume | None = None) -> Path:
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

    hardware = require_valid(config, is_new=resume is None)
    source = None if resume else read_initial_weights(config)

    with explaining_custom_errors():
        data = prepare(config.data)
        run_prompt(config.sample, data, config.data.seq_len)  # raises before the folder is made
        teacher = read_teacher(config, data)
        torch.manual_seed(config.seed)
        module = assemble.build_module(config, data, hardware.layout)
        check_num_params(module.decoder)
    give_teacher(teacher, module, config)
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
        precision: str = hardware.precision
        if resume is not None and config.trainer.precision == "auto":  # as the run began
            precision = Facts.read(resume.folder / run_folder.FACTS_FILE).precision or precision
        console.print(f"precision {precision}")
        run_id = start.run_id or secrets.token_hex(8)
        teacher_sha256 = announce_teacher(teacher, config, resume, console)
        facts = assemble.run_facts(config, data, precision, run_id, teacher_sha256)
        files = initial_files(config, data, facts)
        folder = open_folder(config, resume, start, files)
        if resume is None:
            stack.enter_context(locked_by_first_rank(folder))

        loggers, wandb_line = [], ""
        if is_first_rank():
            loggers, wandb_line = assemble.make_loggers(config, folder, facts)
        layout_line = [hardware.layout.describe()] if hardware.layout.num_ranks > 1 else []
        code_lines = custom_code.describe_code(files, folder) if resume is None else ()
        console.print(*layout_line, wandb_line, *code_lines, f"writing to {folder}/\n", sep="\n")
        callbacks = assemble.make_callbacks(config, data, folder, run_id)
        trainer = assemble.build_trainer(
            config, folder, precision, loggers, callbacks, hardware.layout
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


def read_answers(config: TrainConfig, data: PreparedData, distill: DistillConfig) -> StoredAnswers:
    """Open the stored answers of a teacher.

    Raises ConfigError if they were stored for another text or tokenizer, the run predicts masked tokens, or
    the temperature is not 1.
    """
    option = "objective.distill.teacher"
    answers = StoredAnswers(expand_path(distill.teacher, option), option)
    if not config.model.causal:
        raise ConfigError(
            f"{option}: '{answers.path}' predicts next tokens, but model.causal is false, so this run "
            "predicts masked ones; use the folder of a teacher like the run"
        )
    if distill.temperature != 1:
        raise ConfigError(
            f"objective.distill.temperature ({distill.temperature:g}) must be 1 for '{answers.path}', which "
            "lacks the logits; set it to 1, or use the folder of the teacher"
        )
    answers.require_text(data.tokenizer, data.train)
    return answers


def read_teacher(config: TrainConfig, data: PreparedData) -> Decoder | StoredAnswers | None:
    """Read the teacher of `objective.distill`; None if there is none.

    Raises ConfigError if its tokenizer, `causal` or length does not fit the run, or a weight is not finite.
    """
    if config.objective.distill is None:
        return None
    if config.objective.distill.is_stored:
        return read_answers(config, data, config.objective.distill)
    source = read_source(config.objective.distill.teacher, "objective.distill.teacher")
    source.require_same_tokens(data.tokenizer)
    teacher = source.decoder
    ours, theirs = config.model.causal, teacher.config.causal
    if ours != theirs:
        raise ConfigError(
            f"{source.option}: '{source.folder}' has model.causal {show_value(theirs)} and this run has "
            f"{show_value(ours)}, so they predict other tokens; use a teacher like the run"
        )
    if config.data.seq_len > teacher.max_seq_len:
        raise ConfigError(
            f"{source.option}: '{source.folder}' reads up to {teacher.max_seq_len} tokens, fewer than "
            f"data.seq_len ({config.data.seq_len}); lower data.seq_len, or use another teacher"
        )
    if (name := nonfinite_name(teacher.state_dict())) is not None:
        raise ConfigError(
            f"{source.option}: '{source.folder}' has NaN or infinity in {name}; use another teacher"
        )
    return teacher


def give_teacher(
    teacher: Decoder | StoredAnswers | None, module: LanguageModel, config: TrainConfig
) -> None:
    """Give the model its teacher, if there is one; raise ConfigError if memory cannot hold both."""
    if isinstance(teacher, Decoder):
        weights = teacher.state_dict().values()
        check_fits(config, sum(w.numel() * w.element_size() for w in weights))
    if teacher is not None:
        module.set_teacher(teacher)


def announce_teacher(
    teacher: Decoder | StoredAnswers | None,
    config: TrainConfig,
    resume: Resume | None,
    console: Console,
) -> str | None:
    """Print a teacher's folder and size, and return its hash; ConfigError if it has changed since."""
    if teacher is None or config.objective.distill is None:
        return None
    folder = config.objective.distill.teacher
    if isinstance(teacher, StoredAnswers):
        what, sha256 = "answers", teacher.sha256
        size = f"the {teacher.top} likeliest tokens at {teacher.num_positions:,} positions"
    else:
        what, sha256 = "weights", sha256_of_weights(teacher)
        size = f"{sum(p.numel() for p in teacher.parameters()):,} parameters"
    if resume is not None and resume.saved.objective.distill == config.objective.distill:
        before = Facts.read(resume.folder / run_folder.FACTS_FILE).teacher_sha256
        if before not in (None, sha256):
            raise ConfigError(
                f"objective.distill.teacher: the {what} in '{folder}' have changed since "
                f"'{resume.folder}' began; restore them, or give another path to change the teacher"
            )
    console.print(f"teacher: {folder}, {size}")
    return sha256


def read_initial_weights(config: TrainConfig) -> Source | None:
    """Read the weights of `init_from`; None if it is not set."""
    return None if config.init_from is None else read_source(config.init_from, "init_from")


def load_initial_weights(
    source: Source | None, data: PreparedData, module: LanguageModel, console: Console
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
    max_steps = resume.config.trainer.max_steps
    start = find_resume_point(resume.folder, resume.saved, data, module, max_steps)
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
