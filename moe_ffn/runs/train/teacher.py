"""The teacher of `objective.distill`: read and announced."""

from __future__ import annotations

from rich.console import Console

from moe_ffn.config.errors import ConfigError, expand_path
from moe_ffn.config.option_tree import show_value
from moe_ffn.data.prepare import PreparedData
from moe_ffn.runs.config import Resume, TrainConfig
from moe_ffn.runs.memory import check_fits
from moe_ffn.training.distillation import DecoderTeacher, DistillConfig, StoredAnswers, Teacher
from moe_ffn.training.recovery.guard import nonfinite_name
from moe_ffn.weights.open_model import read_source, sha256_of_weights


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


def read_teacher(config: TrainConfig, data: PreparedData) -> Teacher | None:
    """Read the teacher of `objective.distill`; None if there is none.

    Raises ConfigError if its tokenizer, `causal` or length does not fit the run, a weight is not finite, or
    memory cannot hold both.
    """
    if (distill := config.objective.distill) is None:
        return None
    if distill.is_stored:
        return read_answers(config, data, distill)
    source = read_source(distill.teacher, "objective.distill.teacher")
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
    check_fits(config, sum(w.numel() * w.element_size() for w in teacher.state_dict().values()))
    return DecoderTeacher(teacher, distill.temperature)


def announce_teacher(
    teacher: Teacher | None, config: TrainConfig, resume: Resume | None, console: Console
) -> str | None:
    """Print a teacher's folder and size, and return its hash; ConfigError if it has changed since."""
    if teacher is None or config.objective.distill is None:
        return None
    folder = config.objective.distill.teacher
    if isinstance(teacher, StoredAnswers):
        what, sha256 = "answers", teacher.sha256
        size = f"the {teacher.top} likeliest tokens at {teacher.num_positions:,} positions"
    else:
        what, sha256 = "weights", sha256_of_weights(teacher.decoder)
        size = f"{sum(p.numel() for p in teacher.decoder.parameters()):,} parameters"
    if (
        resume is not None
        and resume.saved.objective.distill == config.objective.distill
        and resume.facts.teacher_sha256 not in (None, sha256)
    ):
        raise ConfigError(
            f"objective.distill.teacher: the {what} in '{folder}' have changed since "
            f"'{resume.folder}' began; restore them, or give another path to change the teacher"
        )
    console.print(f"teacher: {folder}, {size}")
    return sha256
