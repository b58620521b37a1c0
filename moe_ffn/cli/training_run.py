"""One training run, from prepared data to the results at its end."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from moe_ffn.cli.exit import EXIT_DIVERGED, EXIT_FAILED, EXIT_INTERRUPTED, EXIT_SIGNAL
from moe_ffn.cli.results import (
    describe_data,
    model_table,
    print_results,
    summary_of,
    write_summary,
)
from moe_ffn.config.environment import is_first_rank
from moe_ffn.config.errors import ConfigError, command, first_line
from moe_ffn.config.import_path import explaining_outside_errors
from moe_ffn.config.trust import trust
from moe_ffn.config.yaml_files import to_yaml
from moe_ffn.data.prepare import PreparedData, prepare, validation_batches
from moe_ffn.data.tokenizer import Tokenizer
from moe_ffn.experts.base import compile_kernels
from moe_ffn.files import reason
from moe_ffn.metrics import unigram_loss
from moe_ffn.model.decoder import Decoder
from moe_ffn.report.page import write_report
from moe_ffn.runs import assemble, outside_code
from moe_ffn.runs import folder as run_folder
from moe_ffn.runs.config import Resume, TrainConfig
from moe_ffn.runs.json_files import Saved
from moe_ffn.runs.parameter_counts import check_num_params
from moe_ffn.runs.reader import read_weights
from moe_ffn.runs.record import check_documents, checkpoint_identity, new_run_id
from moe_ffn.runs.resume import (
    Start,
    find_start,
    first_precision,
    go_back,
    how_to_go_on,
)
from moe_ffn.training.config import FASTEST
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.monitoring.alarms import Advice
from moe_ffn.training.monitoring.loggers import MetricsFile, close
from moe_ffn.training.recovery.checkpoint_file import BEST_NAME, newest_first
from moe_ffn.training.recovery.guard import Diverged
from moe_ffn.training.recovery.stopping import Interrupted, lost_rank
from moe_ffn.training.sampling import run_prompt
from moe_ffn.weights.init_from import Source, fit_weights, read_source
from moe_ffn.weights.pretrained import write_model_folder


def train(config: TrainConfig, resume: Resume | None = None) -> None:
    """Prepare the data, train, and print what came of it.

    Args:
        resume: the run to go on with; None starts a new one.

    Raises:
        ConfigError: the data or the output folder cannot be used, and no run folder was made then; or no
            checkpoint of the run to go on with is good.
        SystemExit: the run did not come to its end; the code says why.
    """
    assemble.quiet_libraries()
    is_main = is_first_rank()
    console = Console(quiet=not is_main)
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)

    precision, layout = assemble.check_trainer(config)
    source: Source | None = None
    if config.init_from is not None and resume is None:  # before data, which may take long
        source = read_source(config.init_from, "init_from")
        source.require_fitting(config.model)
    with explaining_outside_errors():
        data = prepare(config.data, progress=is_main)
        run_prompt(config.sample, data, config.data.seq_len)  # refused before there is a folder
        torch.manual_seed(config.seed)
        module = assemble.build_module(config, data, layout)
        check_num_params(module.decoder)
        console.print(model_table(config, vocab_size=data.tokenizer.vocab_size))
        for note in config.notes():
            say(note)
        say(f"\n{describe_data(data)}")
    with ExitStack() as stack:
        start = None
        if resume is not None:
            stack.enter_context(run_folder.locked(resume.folder) if is_main else nullcontext())
            run_folder.check_entries(resume.folder)  # again, now that no other process trains it
            start = go_on(resume, data, module, say)
            if config.trainer.precision in ("auto", FASTEST):
                precision = first_precision(resume.folder, start, precision)
        if config.init_from is not None and (start is None or start.checkpoint is None):
            source = source or read_source(config.init_from, "init_from")
            for line in _begin_with(source, data.tokenizer, module):
                say(line)
            source = None  # or a second copy of the weights would stay while it trains
        why = ""
        if precision == FASTEST:
            from moe_ffn.cli.fastest_precision import fastest_precision  # which few runs need

            precision, found = fastest_precision(config, data)
            why = f" ({found})"
        run_id = (start and start.run_id) or new_run_id()
        facts = assemble.run_facts(config, data, precision, run_id)
        saved = Saved(run_id=run_id, last_saved_step=start and start.saved_step)
        files = run_files(config, data, facts, saved)
        if resume is not None and start is not None:
            folder = resume.folder
            files = go_back(resume, start, files) if is_main else files
        elif is_main:
            folder = run_folder.make_run_folder(config, files)
            trust(outside_code.named_code(config))
            stack.enter_context(run_folder.locked(folder))
        else:
            folder = Path(config.run.output_dir)
        loggers: list[assemble.Logger] = []
        if is_main:
            loggers, wandb_line = assemble.make_loggers(config, folder, facts)
            code = outside_code.describe_code(files, folder) if resume is None else ()
            ranks = (layout.describe(),) if layout.num_ranks > 1 else ()
            for line in (
                f"precision {precision}{why}",
                *ranks,
                wandb_line,
                *code,
                f"writing to {folder}/\n",
            ):
                say(line)
        whose = checkpoint_identity(config, data, run_id, precision)
        callbacks = assemble.make_callbacks(config, data, folder, files, whose)
        trainer = assemble.build_trainer(config, folder, precision, loggers, callbacks, layout)
        compile_kernels(module, trainer.strategy.root_device)
        token_data = assemble.make_token_data(config, data)
        status = "failed"
        try:
            with ending_as_documented(config, trainer, callbacks, say):
                checkpoint = start and start.checkpoint
                trainer.fit(module, datamodule=token_data, ckpt_path=checkpoint)
                if callbacks.validation.last_step != trainer.global_step:
                    trainer.validate(module, datamodule=token_data, verbose=False)
            status = "success"
        finally:
            try:
                close(loggers, status)
            finally:
                if is_main and status == "failed":
                    add_report(folder)
        if is_main:
            if trainer.global_step < config.trainer.max_steps:
                say(ended_early(config, trainer.global_step))
            targets = validation_batches(config.data, data).targets
            unigram = unigram_loss(data.train, targets, data.tokenizer.vocab_size)
            summary = summary_of(callbacks, unigram)
            lost = write_results(
                folder,
                summary,
                callbacks,
                loggers,
                trainer.global_step,
                partial(write_model, folder, config, data.tokenizer, module.decoder),
            )
            print_results(console, folder, summary, callbacks)
            if lost:
                print(f"error: {lost}", file=sys.stderr)
                raise SystemExit(EXIT_FAILED)


def go_on(
    resume: Resume, data: PreparedData, module: LanguageModel, say: Callable[[str], None]
) -> Start:
    """Find and print where the run goes on; changes nothing.

    Raises:
        ConfigError: it cannot go on.
    """
    outside_code.say_changed_code(resume.folder)
    check_documents(resume.folder, data.documents)
    start = find_start(resume.folder, resume.own, data, module)
    start.require_steps_left(resume.config.trainer.max_steps)
    say(start.describe(resume.folder))
    for key, (before, now) in resume.changes.items():
        say(f"{key} is {json.dumps(now)} now (was {json.dumps(before)})")
    return start


def ended_early(config: TrainConfig, step: int) -> str:
    """Why a run that was not interrupted ended before its last step."""
    limits = {
        "trainer.early_stopping": config.trainer.early_stopping,
        "trainer.max_time": config.trainer.max_time,
    }
    why = " or ".join(name for name, limit in limits.items() if limit is not None)
    return f"ended after step {step} of {config.trainer.max_steps} ({why})"


@contextmanager
def ending_as_documented(
    config: TrainConfig,
    trainer: assemble.Trainer,
    callbacks: assemble.RunCallbacks,
    say: Callable[[str], None],
) -> Iterator[None]:
    """Signals, divergence and a lost rank end the block with a sentence and a code of docs/reliability.md.

    Among several ranks only the first exits with that code: once another fails, Lightning kills the first,
    which still has files to close.
    """
    folder = callbacks.kept.folder
    is_main = trainer.is_global_zero
    try:
        with callbacks.stop.request.listening():
            yield
    except Interrupted as interrupted:
        say(f"{interrupted}; {how_to_go_on(folder, callbacks.checkpoints)}")
        raise SystemExit(EXIT_SIGNAL + interrupted.signum if is_main else 0) from None
    except Diverged as error:
        if is_main:
            saved = newest_first(folder / run_folder.CHECKPOINTS_FOLDER)
            left = (
                f"the last good checkpoint is {saved[0]}"
                if saved
                else "no checkpoint was saved before"
            )
            advice = Advice(config.model, config.objective, config.optimizer, config.trainer)
            print(f"diverged: {error}", file=sys.stderr)
            print(f"diverged: {left}; {advice.against('loss_spike', None)}", file=sys.stderr)
        raise SystemExit(EXIT_DIVERGED if is_main else 0) from None
    except RuntimeError as error:
        if (lost := lost_rank(error, trainer)) is None:
            raise
        if is_main:
            how = how_to_go_on(folder, callbacks.checkpoints)
            print(
                f"error: {lost}, at step {trainer.global_step}; {how}", file=sys.stderr, flush=True
            )
        raise SystemExit(EXIT_FAILED) from None
    except SystemExit:  # Lightning's answer to Ctrl-C a second time
        how = how_to_go_on(folder, callbacks.checkpoints)
        say(f"interrupted at step {trainer.global_step}; {how}")
        raise SystemExit(EXIT_INTERRUPTED) from None


def run_files(
    config: TrainConfig, data: PreparedData, facts: dict[str, Any], saved: Saved
) -> dict[str, str]:
    """The files that a run begins with, name -> text: options, facts, tokenizer, documents, code."""
    return {
        run_folder.CONFIG_FILE: to_yaml(outside_code.portable_options(config)),
        run_folder.FACTS_FILE: json.dumps(facts, indent=2) + "\n",
        run_folder.TOKENIZER_FILE: json.dumps(data.tokenizer.to_dict()),
        run_folder.DOCUMENTS_FILE: json.dumps(data.documents.to_dict()),
        run_folder.SAVED_FILE: saved.to_text(),
        **outside_code.code_files(config),
    }


def write_results(
    folder: Path,
    summary: Mapping[str, Any],
    callbacks: assemble.RunCallbacks,
    loggers: list[assemble.Logger],
    step: int,
    write_model: Callable[[], str],
) -> str:
    """Write the model, the summary and the page; returns what could not be written, or the empty string.

    A run without its last weights or its model has no summary, so that `--resume` can still bring it to its
    end.
    """
    callbacks.kept.put_back()
    lost = ""
    if problem := callbacks.checkpoints.problem:
        lost = f"the weights of step {step} are not saved ({problem})"
    else:
        try:
            lost = write_model()
            if not lost:
                write_summary(folder, summary, callbacks)
        except OSError as error:
            lost = f"the summary is not written ({reason(error)})"
    has_page = add_report(folder)
    if lost:
        return f"{lost}; fix that, then: {command('train')} --resume {folder}"
    if not has_page:
        return f"the page is not written; fix that, then: {command('report')} {folder}"
    files = [callbacks.steps.alarm_log.file, callbacks.samples.file]
    files += [logger.file for logger in loggers if isinstance(logger, MetricsFile)]
    lacking = [str(file.path.relative_to(folder)) for file in files if not file.is_complete]
    if callbacks.checkpoints.lacks_best:
        lacking.append(f"{run_folder.CHECKPOINTS_FOLDER}/{BEST_NAME}")
    return f"could not write the last entries of {', '.join(lacking)}" if lacking else ""


def _begin_with(source: Source, tokenizer: Tokenizer, module: LanguageModel) -> list[str]:
    """Have a model begin with the weights of another; lines about them."""
    source.require_same_tokens(tokenizer)
    weights, lines = fit_weights(source, module.decoder)
    module.start_from(weights)
    return lines


def write_model(folder: Path, config: TrainConfig, tokenizer: Tokenizer, decoder: Decoder) -> str:
    """Write the best weights of a run as a model folder inside of its own.

    Returns:
        why the disk did not take it, or the empty string; a line says why it cannot be made at all.
    """
    try:
        weights = read_weights(folder, config, tokenizer, decoder)
        write_model_folder(folder / run_folder.MODEL_FOLDER, decoder, weights, tokenizer)
    except Exception as error:  # of any kind: a run is not to be lost to a block of a user's own
        if isinstance(error, ConfigError) and error.__cause__ is not None:
            return f"the model is not written: {error}"
        print(f"no {run_folder.MODEL_FOLDER} folder: {first_line(error)}", file=sys.stderr)
    return ""


def add_report(folder: Path) -> bool:
    """The run, which has ended, as a page, `report.html`; one line where that cannot be made.

    Returns:
        whether the disk took it.
    """
    try:
        write_report([folder], folder / run_folder.REPORT_FILE, has_ended=True)
    except Exception as error:  # of any kind: a run is not to be lost to its page
        cause = error.__cause__
        why = reason(cause) if isinstance(cause, OSError) else first_line(error)
        print(f"{run_folder.REPORT_FILE}: {why}", file=sys.stderr)
        return not isinstance(cause, OSError)
    return True
