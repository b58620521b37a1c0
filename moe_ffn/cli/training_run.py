"""One training run, from its options to its results."""

from __future__ import annotations

import json
import logging
import secrets
import signal
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from moe_ffn.cli.results import (
    baseline_losses,
    describe_data,
    model_table,
    print_results,
    summary_of,
    write_summary,
)
from moe_ffn.config.environment import is_first_rank
from moe_ffn.config.errors import ConfigError, command, expand_path, first_line
from moe_ffn.config.import_path import explaining_custom_errors
from moe_ffn.config.option_tree import show_value
from moe_ffn.config.trust import trust
from moe_ffn.config.yaml_files import to_yaml
from moe_ffn.data.prepare import PreparedData, prepare
from moe_ffn.files import reason
from moe_ffn.kernels.memory import keep_freed_memory
from moe_ffn.kernels.native.build import compile_kernels
from moe_ffn.model.decoder import Decoder
from moe_ffn.report.page import write_report
from moe_ffn.runs import assemble, custom_code
from moe_ffn.runs import folder as run_folder
from moe_ffn.runs.config import Resume, TrainConfig
from moe_ffn.runs.custom_parts import check_num_params
from moe_ffn.runs.json_files import Facts
from moe_ffn.runs.memory import check_fits
from moe_ffn.runs.reader import read_weights
from moe_ffn.runs.resume import ResumePoint, find_resume_point, resume_hint, rewind
from moe_ffn.runs.texts import check_documents
from moe_ffn.runs.validate import find_hardware, require_valid
from moe_ffn.training.distillation import DistillConfig, StoredAnswers
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.monitoring.alarms import Advice
from moe_ffn.training.monitoring.loggers import MetricsFile, close
from moe_ffn.training.recovery import TrainingError
from moe_ffn.training.recovery.checkpoint_file import BEST_NAME, newest_first
from moe_ffn.training.recovery.guard import Diverged, nonfinite_name
from moe_ffn.training.recovery.stopping import Interrupted, lost_rank
from moe_ffn.training.sampling import run_prompt
from moe_ffn.weights.init_from import Source, fit_weights, read_source, sha256_of_weights
from moe_ffn.weights.pretrained import write_model_folder

log = logging.getLogger(__name__)

Say = Callable[[str], None]
"""Print a line, on the first rank."""


def train(config: TrainConfig, resume: Resume | None = None) -> Path:
    """Validate the options, prepare the data, build and train the model, and write the results.

    Args:
        resume: the run to resume; None starts a new run.

    Returns:
        The folder of the run, on the first rank.

    Raises:
        ConfigError: the options, the data or the folder cannot be used, and no new folder was made; or the
            run to resume has no intact checkpoint.
        Interrupted: a signal ended the run.
        Diverged: too many consecutive steps were skipped.
        TrainingError: a rank was lost, or the results could not be written.
        SystemExit: the run was interrupted or diverged, on another rank than the first.
    """
    is_main = is_first_rank()
    console = Console(quiet=not is_main)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    assemble.quiet_libraries()

    require_valid(config, is_new=resume is None)
    hardware = find_hardware(config)
    source = None if resume else read_initial_weights(config)

    with explaining_custom_errors():
        data = prepare(config.data)
        run_prompt(config.sample, data, config.data.seq_len)  # raises before the folder is made
        teacher = read_teacher(config, data)
        torch.manual_seed(config.seed)
        module = assemble.build_module(config, data, hardware.layout)
        check_num_params(module.decoder)
    if teacher is not None:
        if isinstance(teacher, Decoder):
            weights = teacher.state_dict().values()
            check_fits(config, sum(w.numel() * w.element_size() for w in weights))
        module.set_teacher(teacher)
    console.print(model_table(config, vocab_size=data.tokenizer.vocab_size))
    for line in (*config.notes(), f"\n{describe_data(data)}"):
        say(line)

    with ExitStack() as stack:
        start = ResumePoint()
        if resume is not None:
            stack.enter_context(locked_by_first_rank(resume.folder))
            start = announce_resume_point(resume, data, module, say)
        if start.checkpoint is None:
            load_initial_weights(source or read_initial_weights(config), data, module, say)
        source = None  # frees the second copy of the weights
        precision = hardware.precision
        if resume is not None and config.trainer.precision == "auto":
            # Keep the precision of the first start.
            precision = Facts.read(resume.folder / run_folder.FACTS_FILE).precision or precision
        say(f"precision {precision}")
        run_id = start.run_id or secrets.token_hex(8)
        teacher_sha256 = announce_teacher(teacher, config, resume, say)
        facts = assemble.run_facts(config, data, precision, run_id, teacher_sha256)
        files = initial_files(config, data, facts)
        folder = open_folder(config, resume, start, files)
        if resume is None:
            stack.enter_context(locked_by_first_rank(folder))

        loggers, wandb_line = assemble.make_loggers(config, folder, facts) if is_main else ([], "")
        layout_line = [hardware.layout.describe()] if hardware.layout.num_ranks > 1 else []
        code_lines = custom_code.describe_code(files, folder) if resume is None else ()
        for line in (*layout_line, wandb_line, *code_lines, f"writing to {folder}/\n"):
            say(line)
        callbacks = assemble.make_callbacks(config, data, folder, run_id)
        trainer = assemble.build_trainer(
            config, folder, precision, loggers, callbacks, hardware.layout
        )
        if trainer.strategy.root_device.type == "cpu":
            compile_kernels()
            keep_freed_memory()

        token_data = assemble.make_token_data(config, data)
        with explaining_early_end(config, trainer, callbacks, loggers, say):
            trainer.fit(module, datamodule=token_data, ckpt_path=start.checkpoint)
            if callbacks.validation.last_step != trainer.global_step:
                trainer.validate(module, datamodule=token_data, verbose=False)
        if is_main:
            finish(config, data, module, trainer, callbacks, loggers, console, say)
    return folder


def read_answers(config: TrainConfig, data: PreparedData, distill: DistillConfig) -> StoredAnswers:
    """Open the stored answers of a teacher.

    Raises:
        ConfigError: they were stored for another text or tokenizer, the run predicts masked tokens, or the
            temperature is not 1.
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

    Raises:
        ConfigError: its tokenizer, `causal` or its maximum length does not fit the run, or a weight is not
            finite.
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


def announce_teacher(
    teacher: Decoder | StoredAnswers | None, config: TrainConfig, resume: Resume | None, say: Say
) -> str | None:
    """Print the teacher's folder and size, and return the hash of its weights; None without a teacher.

    Raises:
        ConfigError: a resumed run names the teacher it began with, but the weights or answers have changed.
    """
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
    say(f"teacher: {folder}, {size}")
    return sha256


def read_initial_weights(config: TrainConfig) -> Source | None:
    """Read the weights of `init_from`; None if it is not set."""
    return None if config.init_from is None else read_source(config.init_from, "init_from")


def load_initial_weights(
    source: Source | None, data: PreparedData, module: LanguageModel, say: Say
) -> None:
    """Replace the random weights of a model by the weights of `init_from`, if it is set."""
    if source is not None:
        source.require_same_tokens(data.tokenizer)
        weights, lines = fit_weights(source, module.decoder)
        module.start_from(weights)
        say("\n".join(lines))


def locked_by_first_rank(folder: Path) -> AbstractContextManager[None]:
    """Lock the folder for all ranks; the first rank holds the lock."""
    return run_folder.locked(folder) if is_first_rank() else nullcontext()


def announce_resume_point(
    resume: Resume, data: PreparedData, module: LanguageModel, say: Say
) -> ResumePoint:
    """Find and print the step at which the run resumes, without changing a file.

    Raises:
        ConfigError: the run cannot be resumed.
    """
    custom_code.warn_if_code_changed(resume.folder)
    check_documents(resume.folder, data.documents)
    max_steps = resume.config.trainer.max_steps
    start = find_resume_point(resume.folder, resume.saved, data, module, max_steps)
    say(start.describe(resume.folder))
    for key, (before, now) in resume.changes.items():
        say(f"{key} is {json.dumps(now)} now (was {json.dumps(before)})")
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


@contextmanager
def explaining_early_end(
    config: TrainConfig,
    trainer: assemble.Trainer,
    callbacks: assemble.RunCallbacks,
    loggers: list[assemble.Logger],
    say: Say,
) -> Iterator[None]:
    """Explain a signal, divergence or a lost rank in a message, and raise it as a TrainingError.

    At the end, the loggers are closed, and the page of a failed run is written. After a signal or divergence,
    only the first rank raises, and the others exit with code 0: if another rank failed first, Lightning would
    kill the first rank before its files are closed.
    """
    folder = callbacks.checkpoints.folder.parent
    is_main, status = trainer.is_global_zero, "failed"
    try:
        with callbacks.stop.request.listening():
            yield
        status = "success"
    except Interrupted as interrupted:
        say(f"{interrupted}; {resume_hint(folder, callbacks.checkpoints)}")
        if not is_main:
            raise SystemExit(0) from None
        raise
    except Diverged as error:
        if not is_main:
            raise SystemExit(0) from None
        saved = newest_first(folder / run_folder.CHECKPOINTS_FOLDER)
        last = f"the last good checkpoint is {saved[0]}" if saved else "no checkpoint was saved"
        advice = Advice(config.model, config.objective, config.optimizer, config.trainer)
        fix = error.skipped.advice or advice.against("loss_spike", None)
        for line in (error, f"{last}; {fix}"):
            log.error("%s", line, extra={"prefix": "diverged"})
        raise
    except RuntimeError as error:
        if (lost := lost_rank(error, trainer)) is None:
            raise
        message = f"{lost}, at step {trainer.global_step}"
        if is_main:
            log.error("%s; %s", message, resume_hint(folder, callbacks.checkpoints))
        raise TrainingError(message) from None
    except SystemExit:  # Lightning raises it at a second Ctrl-C
        hint = resume_hint(folder, callbacks.checkpoints)
        say(f"interrupted at step {trainer.global_step}; {hint}")
        raise Interrupted(signal.SIGINT, trainer.global_step) from None
    finally:
        try:
            close(loggers, status)
        finally:
            if status == "failed" and is_first_rank():
                add_report(folder)


def finish(
    config: TrainConfig,
    data: PreparedData,
    module: LanguageModel,
    trainer: assemble.Trainer,
    callbacks: assemble.RunCallbacks,
    loggers: list[assemble.Logger],
    console: Console,
    say: Say,
) -> None:
    """Write and print the results.

    If the last weights or the model cannot be written, no summary is written, so that `--resume` can finish
    the run.

    Raises:
        TrainingError: a file of the results could not be written.
    """
    folder = callbacks.checkpoints.folder.parent
    if trainer.global_step < (max_steps := config.trainer.max_steps):
        limits = {
            "trainer.early_stopping": config.trainer.early_stopping,
            "trainer.max_time": config.trainer.max_time,
        }
        why = " or ".join(name for name, limit in limits.items() if limit is not None)
        say(f"ended after step {trainer.global_step} of {max_steps} ({why})")
    num_batches = trainer.global_step * trainer.accumulate_grad_batches
    baselines = baseline_losses(config.data, data, num_batches, config.seed)
    summary = summary_of(callbacks, baselines)
    failure = ""
    if problem := callbacks.checkpoints.problem:
        failure = f"the weights of step {trainer.global_step} are not saved ({problem})"
    else:
        try:
            write_model(folder, config, data, module)
            write_summary(folder, summary, callbacks)
        except ConfigError as error:
            failure = f"the model is not written: {error}"
        except OSError as error:
            failure = f"the summary is not written ({reason(error)})"
    has_page = add_report(folder)
    print_results(console, folder, summary, callbacks)
    files = [callbacks.steps.alarm_log.file, callbacks.samples.file]
    files += [logger.file for logger in loggers if isinstance(logger, MetricsFile)]
    incomplete = [str(file.path.relative_to(folder)) for file in files if not file.is_complete]
    if callbacks.checkpoints.lacks_best:
        incomplete.append(f"{run_folder.CHECKPOINTS_FOLDER}/{BEST_NAME}")
    if failure:
        failure += f"; fix that, then: {command('train')} --resume {folder}"
    elif not has_page:
        failure = f"the page is not written; fix that, then: {command('report')} {folder}"
    elif incomplete:
        failure = f"could not write the last entries of {', '.join(incomplete)}"
    if failure:
        log.error("%s", failure)
        raise TrainingError(failure)


def write_model(
    folder: Path, config: TrainConfig, data: PreparedData, module: LanguageModel
) -> None:
    """Write the best weights as a model folder inside the run's folder; other failures are warnings.

    Raises:
        ConfigError: a file cannot be written.
    """
    tokenizer, decoder = data.tokenizer, module.decoder
    try:
        weights = read_weights(folder, config, tokenizer, decoder)
        write_model_folder(folder / run_folder.MODEL_FOLDER, decoder, weights, tokenizer)
    except Exception as error:  # an error in a custom block must not fail a finished run
        if isinstance(error, ConfigError) and error.__cause__ is not None:
            raise
        log.warning("no %s folder: %s", run_folder.MODEL_FOLDER, first_line(error))


def add_report(folder: Path) -> bool:
    """Write the page of a run that has ended; a failure is a warning.

    Returns:
        False if the file cannot be written.
    """
    try:
        write_report([folder], folder / run_folder.REPORT_FILE, has_ended=True)
    except Exception as error:  # an error in the page must not fail a finished run
        cause = error.__cause__
        why = reason(cause) if isinstance(cause, OSError) else first_line(error)
        log.warning("%s: %s", run_folder.REPORT_FILE, why)
        return not isinstance(cause, OSError)
    return True
