"""The end of a run: its results, its page, and messages about an early end."""

from __future__ import annotations

import json
import logging
import signal
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import Tensor

from moe_ffn.config.environment import is_first_rank
from moe_ffn.config.errors import ConfigError, command, first_line
from moe_ffn.config.files import reason, write_atomically
from moe_ffn.data.batches import TrainBatches
from moe_ffn.data.prepare import PreparedData, validation_batches
from moe_ffn.metrics.baselines import ngram_loss, unigram_loss
from moe_ffn.report.page import report_html, write_report
from moe_ffn.report.tables import print_results
from moe_ffn.runs import assemble
from moe_ffn.runs import folder as run_folder
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.json_files import plain_values
from moe_ffn.runs.reader import read_weights
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.monitoring.alarms import Advice
from moe_ffn.training.monitoring.loggers import MetricsFile, close
from moe_ffn.training.recovery import TrainingError
from moe_ffn.training.recovery.checkpoint_file import BEST_NAME, newest_first, step_name
from moe_ffn.training.recovery.guard import Diverged
from moe_ffn.training.recovery.stopping import Interrupted, lost_rank
from moe_ffn.weights.pretrained import write_model_folder

log = logging.getLogger(__name__)

MAX_WINDOWS = 1024
"""Maximum number of window losses in a summary; a bootstrap needs no more."""

MAX_COUNTED = 1 << 24
"""Maximum number of tokens that the 5-gram model counts, which takes half a minute and 2 GiB."""


@dataclass(frozen=True)
class TrainingRun:
    """A run in its folder, ready to train."""

    config: TrainConfig
    folder: Path
    data: PreparedData
    module: LanguageModel
    trainer: assemble.Trainer
    callbacks: assemble.RunCallbacks
    loggers: list[assemble.Logger]
    console: Console
    """Prints on the first rank."""

    @property
    def resume_hint(self) -> str:
        """Last saved checkpoint and the command that resumes the run, as a sentence."""
        step = self.callbacks.checkpoints.last_saved_step
        saved = "no checkpoint was saved" if step < 0 else f"saved {step_name(step)}"
        return f"{saved}; resume with: {command('train', '--resume', self.folder)}"


@contextmanager
def explaining_early_end(run: TrainingRun) -> Iterator[None]:
    """Explain a signal, divergence or a lost rank in a message, and raise it as a TrainingError.

    At the end, the loggers are closed, and the page of a failed run is written. After a signal or divergence,
    only the first rank raises, and the others exit with code 0: if another rank failed first, Lightning would
    kill the first rank before its files are closed.
    """
    config, trainer = run.config, run.trainer
    is_main, status = trainer.is_global_zero, "failed"
    try:
        with run.callbacks.stop.request.listening():
            yield
        status = "success"
    except Interrupted as interrupted:
        run.console.print(f"{interrupted}; {run.resume_hint}")
        if not is_main:
            raise SystemExit(0) from None
        raise
    except Diverged as error:
        if not is_main:
            raise SystemExit(0) from None
        saved = newest_first(run.folder / run_folder.CHECKPOINTS_FOLDER)
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
            log.error("%s; %s", message, run.resume_hint)
        raise TrainingError(message) from None
    except SystemExit:  # Lightning raises it at a second Ctrl-C
        run.console.print(f"interrupted at step {trainer.global_step}; {run.resume_hint}")
        raise Interrupted(signal.SIGINT, trainer.global_step) from None
    finally:
        try:
            close(run.loggers, status)
        finally:
            if status == "failed" and is_first_rank():
                add_report(run.folder)


def finish(run: TrainingRun) -> None:
    """Write and print the results; raise TrainingError if a file of the results could not be written.

    If the last weights or the model cannot be written, no summary is written, so that `--resume` can finish
    the run.
    """
    config, folder, trainer, callbacks = run.config, run.folder, run.trainer, run.callbacks
    if trainer.global_step < (max_steps := config.trainer.max_steps):
        why = " or ".join(config.trainer.early_limits)
        run.console.print(f"ended after step {trainer.global_step} of {max_steps} ({why})")
    summary = summary_of(run)
    failure = ""
    if problem := callbacks.checkpoints.problem:
        failure = f"the weights of step {trainer.global_step} are not saved ({problem})"
    else:
        try:
            write_model(run)
            write_summary(folder, summary, callbacks)
        except ConfigError as error:
            failure = f"the model is not written: {error}"
        except OSError as error:
            failure = f"the summary is not written ({reason(error)})"
    has_page = add_report(folder)
    print_results(run.console, folder, summary, callbacks)
    files = [callbacks.steps.alarm_log.file, callbacks.samples.file]
    files += [logger.file for logger in run.loggers if isinstance(logger, MetricsFile)]
    incomplete = [str(file.path.relative_to(folder)) for file in files if not file.is_complete]
    if callbacks.checkpoints.lacks_best:
        incomplete.append(f"{run_folder.CHECKPOINTS_FOLDER}/{BEST_NAME}")
    if failure:
        failure += f"; fix that, then: {command('train', '--resume', folder)}"
    elif not has_page:
        failure = f"the page is not written; fix that, then: {command('report', folder)}"
    elif incomplete:
        failure = f"could not write the last entries of {', '.join(incomplete)}"
    if failure:
        log.error("%s", failure)
        raise TrainingError(failure)


def write_model(run: TrainingRun) -> None:
    """Write the best weights as a model folder; ConfigError if a file cannot be written, else only warn."""
    tokenizer, decoder = run.data.tokenizer, run.module.decoder
    try:
        weights = read_weights(run.folder, run.config, tokenizer, decoder)
        write_model_folder(run.folder / run_folder.MODEL_FOLDER, decoder, weights, tokenizer)
    except Exception as error:  # an error in a custom block must not fail a finished run
        if isinstance(error, ConfigError) and error.__cause__ is not None:
            raise
        log.warning("no %s folder: %s", run_folder.MODEL_FOLDER, first_line(error))


def add_report(folder: Path) -> bool:
    """Write the page of a run that has ended; a failure is a warning. False if it cannot be written."""
    try:
        write_report(report_html, [folder], folder / run_folder.REPORT_FILE, has_ended=True)
    except Exception as error:  # an error in the page must not fail a finished run
        cause = error.__cause__
        why = reason(cause) if isinstance(cause, OSError) else first_line(error)
        log.warning("%s: %s", run_folder.REPORT_FILE, why)
        return not isinstance(cause, OSError)
    return True


# -- summary.json


def baseline_losses(run: TrainingRun) -> dict[str, float | None]:
    """Return the losses of the unigram model and of the 5-gram model, in nats per token.

    The unigram model counts the whole training split; the 5-gram model counts what the run has read,
    each text once, up to `MAX_COUNTED` tokens. It predicts next tokens, so it is None for masked ones.
    """
    data, config = run.data, run.config.data
    vocab_size = data.tokenizer.vocab_size
    validation = validation_batches(config, data).windows
    unigrams = unigram_loss(data.train, validation[:, 1:].reshape(-1), vocab_size)
    if not run.config.model.causal:
        return {"unigram_loss": unigrams, "ngram_loss": None}
    batches = TrainBatches(
        data.train, seq_len=config.seq_len, batch_size=config.batch_size, seed=run.config.seed
    )
    num_batches = run.trainer.global_step * run.trainer.accumulate_grad_batches
    read = batches.windows_read(num_batches, MAX_COUNTED)
    return {"unigram_loss": unigrams, "ngram_loss": ngram_loss(read, validation, vocab_size)}


def summary_of(run: TrainingRun) -> dict[str, Any]:
    """Return the content of `summary.json` of a finished run; see `runs.json_files.Summary`."""
    steps, validation = run.callbacks.steps, run.callbacks.validation
    return {
        "validation_loss": validation.last["loss"],
        "validation_bits_per_byte": validation.last["bits_per_byte"],
        **baseline_losses(run),
        "tokens_per_second": steps.tokens_per_second,
        "num_tokens": steps.total_tokens,
        "train_seconds": steps.total_seconds,
        "wall_seconds": steps.total_seconds + steps.validation_seconds,
        "peak_memory_bytes": steps.peak_memory_bytes,
        "window_losses": window_losses(validation.window_losses),
        "num_alarms": steps.alarm_log.num_alarms,
        "num_skipped_steps": steps.num_skipped,
        "routing": validation.routing,
    }


def window_losses(losses_N: Tensor) -> list[float]:
    """Return the losses of N windows to 5 digits, or means of neighbours if N exceeds `MAX_WINDOWS`."""
    size = -(-len(losses_N) // MAX_WINDOWS) or 1
    return [round(part.mean().item(), 5) for part in losses_N.split(size)]


def write_summary(
    folder: Path, summary: Mapping[str, Any], callbacks: assemble.RunCallbacks
) -> None:
    """Write the sample, the profile and `summary.json`, which marks the run as finished."""
    if callbacks.samples.last:
        write_atomically(folder / "sample.txt", callbacks.samples.prompt + callbacks.samples.last)
    if callbacks.profile.text:
        write_atomically(folder / "profile.txt", callbacks.profile.text)
    else:  # of the run before it was resumed
        (folder / "profile.txt").unlink(missing_ok=True)
    write_atomically(
        folder / run_folder.SUMMARY_FILE, json.dumps(plain_values(summary), indent=2) + "\n"
    )
