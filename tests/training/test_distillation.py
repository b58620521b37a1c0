"""A run learns the predictions of a teacher: its loss, its share of the objective, and whom it accepts.

`test_parallel.py` compares the gradients of ranks and accumulated batches, with a teacher, to one process.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

import moe_ffn
from moe_ffn import ConfigError, DecoderConfig
from moe_ffn.cli.training_run import read_teacher
from moe_ffn.data.prepare import PreparedData
from moe_ffn.data.tokenizer import Tokenizer, train_bpe
from moe_ffn.runs.folder import CHECKPOINTS_FOLDER
from moe_ffn.training.distillation import distillation_loss
from moe_ffn.training.objective import IGNORED_TARGET, ObjectiveConfig, objective
from moe_ffn.training.recovery.checkpoint_file import newest_first, read_checkpoint
from tests.helpers.fitted import MakeConfig
from tests.helpers.same_run import differences
from tests.helpers.tiny_runs import run_here

TARGETS = torch.tensor([[1, IGNORED_TARGET, 0], [2, 2, IGNORED_TARGET]])


def logits(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(2, 3, 5, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("temperature", [1.0, 3.0])
def test_the_loss_is_the_divergence_from_the_teacher_at_predicted_tokens(
    temperature: float,
) -> None:
    counted = TARGETS != IGNORED_TARGET
    theirs, ours = (Categorical(logits=logits(seed)[counted] / temperature) for seed in (0, 1))
    wanted = temperature**2 * kl_divergence(theirs, ours).mean()

    found = distillation_loss(logits(1), logits(0), counted, temperature)

    torch.testing.assert_close(found, wanted)


def test_the_objective_averages_text_and_teacher_and_gives_the_teacher_no_gradient() -> None:
    ours, theirs = logits(1).requires_grad_(), logits(0).requires_grad_()
    weights = ObjectiveConfig.model_validate({"distill": {"teacher": "any", "weight": 0.25}})

    found = objective(ours, TARGETS, {}, weights, teacher_logits_BSV=theirs)
    found.total.backward()

    assert found.distillation is not None
    assert found.distillation > 0
    torch.testing.assert_close(found.total, 0.75 * found.cross_entropy + 0.25 * found.distillation)
    assert theirs.grad is None
    assert found.detach().other_terms.keys() == {"distillation"}


def save(
    folder: Path, seq_len: int = 16, tokenizer: Tokenizer | None = None, **options: Any
) -> str:
    """Save a dense teacher of one narrow layer, and return its folder."""
    torch.manual_seed(1)
    small = {"d_model": 8, "num_layers": 1, "attention": {"num_heads": 1}, "ffn": "swiglu"}
    vocab_size = 257 if tokenizer is None else tokenizer.vocab_size
    decoder = DecoderConfig.model_validate(small | options).build(vocab_size, seq_len)
    moe_ffn.save_pretrained(decoder.eval(), folder, tokenizer)
    return str(folder)


def test_a_teacher_whose_logits_are_not_finite_is_named(run_train: Any, tmp_path: Path) -> None:
    folder = Path(save(tmp_path / "teacher"))
    teacher = moe_ffn.load_pretrained(folder)
    with torch.no_grad():
        teacher.embedding.weight.mul_(1e3)
        teacher.final_norm.weight.fill_(1e38)  # finite, but the product is not
    moe_ffn.save_pretrained(teacher, folder)

    guard = ("--trainer.guard.max_skipped_in_a_row", "2")
    done = run_train(tmp_path, "--objective.distill.teacher", str(folder), *guard)

    assert done.code == 3
    assert done.stderr.count("its loss is nan, which began in the logits of the teacher; ") == 1
    assert done.stderr.count("use another objective.distill.teacher, with finite logits") == 2
    assert "learning_rate" not in done.stderr


def test_a_run_resumes_with_its_teacher_whose_weights_stay_out_of_the_checkpoint(
    run_train: Any, tmp_path: Path
) -> None:
    teacher = save(tmp_path / "teacher")
    whole = run_train(tmp_path, "--objective.distill.teacher", teacher)
    assert whole.code == 0, whole.stderr
    assert "train/distillation" in whole.columns
    copy = shutil.copytree(whole.folder, tmp_path / "copy")
    last, _ = newest_first(copy / CHECKPOINTS_FOLDER)
    assert not any("teacher" in name for name in read_checkpoint(last)["state_dict"])
    for path in (last, copy / "summary.json"):
        path.unlink()
    shutil.rmtree(copy / "model")

    resumed = run_here("--resume", str(copy))

    assert resumed.code == 0, resumed.stderr
    assert "resuming" in resumed.stderr + resumed.stdout
    assert f"teacher: {teacher}, " in resumed.stdout
    assert differences(whole.folder, copy) == []

    shutil.rmtree(teacher)
    save(tmp_path / "teacher", norm={"type": "layer_norm"})
    refused = run_here("--resume", str(copy), "--trainer.max_steps", "8")
    assert refused.code == 2
    assert f"the weights in '{teacher}' are not those with which '{copy}' began" in refused.stderr


def test_a_resumed_run_may_go_on_with_another_teacher(run_train: Any, tmp_path: Path) -> None:
    first, second = save(tmp_path / "first"), save(tmp_path / "second", ffn="geglu")
    run = run_train(
        tmp_path, "--objective.distill.teacher", first, "--trainer.max_steps", "2"
    ).folder

    changed = ("--objective.distill.teacher", second, "--trainer.max_steps", "3")
    assert run_here("--resume", str(run), *changed).code == 0

    resumed = run_here("--resume", str(run), "--trainer.max_steps", "4")
    assert resumed.code == 0, resumed.stderr
    assert f"teacher: {second}, " in resumed.stdout


def test_a_model_that_begins_as_its_teacher_has_nothing_to_learn_from_it(
    run_train: Any, tmp_path: Path
) -> None:
    teacher = save(tmp_path / "teacher")
    model = ("--model", "{d_model: 8, num_layers: 1, attention: {num_heads: 1}, ffn: swiglu}")
    still = ("--optimizer.learning_rate", "1e-12", "--trainer.max_steps", "2")

    done = run_train(
        tmp_path, *model, *still, "--init_from", teacher, "--objective.distill.teacher", teacher
    )

    assert done.code == 0, done.stderr
    assert done.rows[0]["train/distillation"] == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("saved", "said"),
    [
        ({"causal": False}, "has model.causal false and this run has true"),
        (
            {"seq_len": 8},
            r"reads up to 8 tokens, fewer than data.seq_len \(16\); lower data.seq_len",
        ),
        ({"nan": True}, "has NaN or infinity in embedding.weight; use another teacher"),
        (
            {"tokenizer": True},
            r"has [\d,]+ tokens, but the tokenizer of this run has 257; use its own: ",
        ),
    ],
)
def test_a_teacher_that_predicts_something_else_is_refused(
    saved: dict[str, Any],
    said: str,
    make_config: MakeConfig,
    prepared: PreparedData,
    tmp_path: Path,
) -> None:
    if "tokenizer" in saved:
        saved = {"tokenizer": train_bpe([b"the cat sat on the mat " * 20], vocab_size=270)}
    is_broken = saved.pop("nan", False)
    folder = save(tmp_path / "teacher", **saved)
    if is_broken:
        teacher = moe_ffn.load_pretrained(folder)
        with torch.no_grad():
            teacher.embedding.weight[3, 5] = torch.nan
        moe_ffn.save_pretrained(teacher, folder)
    config = make_config(objective={"distill": {"teacher": folder}})
    with pytest.raises(ConfigError, match=f"^objective.distill.teacher: .*{said}"):
        read_teacher(config, prepared)
