"""A run learns the predictions of a teacher: its loss, its share of the objective, and whom it accepts.

`test_parallel.py` compares the gradients of ranks and accumulated batches, with a teacher, to one process.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save as save_tensors
from torch import Tensor
from torch.distributions import Categorical, kl_divergence

import moe_ffn
from moe_ffn import ConfigError, DecoderConfig
from moe_ffn.data.batches import TrainBatches
from moe_ffn.data.prepare import PreparedData, prepare
from moe_ffn.data.tokenizer import BytesTokenizer, Tokenizer, train_bpe
from moe_ffn.runs.folder import CHECKPOINTS_FOLDER
from moe_ffn.runs.train.teacher import read_teacher
from moe_ffn.training.distillation import (
    Answers,
    DecoderTeacher,
    StoredAnswers,
    digests_of,
    distillation_loss,
    stored_distillation_loss,
    write_answers,
)
from moe_ffn.training.objective import IGNORED_TARGET, ObjectiveConfig, objective
from moe_ffn.training.recovery.checkpoint_file import newest_first, read_checkpoint
from tests.helpers.fitted import MakeConfig
from tests.helpers.same_run import differences
from tests.helpers.tiny_runs import finished_copy, run_here, trained

EVALUATE = "moe_ffn.cli.evaluate"
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


def naive_stored_loss(ours: Tensor, theirs: Tensor, counted: Tensor, top: int) -> Tensor:
    """The divergence between the distributions over `top` tokens and one bin, position by position."""
    losses = []
    for q, p in zip(ours[counted].softmax(-1), theirs[counted].softmax(-1), strict=True):
        best = sorted(range(len(p)), key=lambda v: -p[v].item())[:top]
        others = [v for v in range(len(p)) if v not in best]
        bins = [[v] for v in best] + ([others] if others else [])
        p_bins, q_bins = (torch.stack([x[b].sum() for b in bins]) for x in (p, q))
        losses.append(kl_divergence(Categorical(probs=p_bins), Categorical(probs=q_bins)))
    return torch.stack(losses).mean()


@pytest.mark.parametrize("top", [1, 3, 5])
def test_the_loss_of_stored_answers_has_a_bin_for_all_other_tokens(top: int) -> None:
    counted, theirs = TARGETS != IGNORED_TARGET, logits(0)
    found, wanted = logits(1).requires_grad_(), logits(1).requires_grad_()
    answers = Answers.of(theirs, top)

    loss = stored_distillation_loss(found, answers, counted)
    oracle = naive_stored_loss(wanted, theirs, counted, top)
    loss.backward()
    oracle.backward()

    # The file holds float32.
    torch.testing.assert_close(loss, oracle, rtol=1e-6, atol=1e-7)
    torch.testing.assert_close(found.grad, wanted.grad, rtol=1e-5, atol=1e-7)
    whole = distillation_loss(logits(1), theirs, counted)
    assert loss <= whole + 1e-6
    assert (top == 5) == torch.isclose(loss.detach(), whole, rtol=1e-5)


def test_the_objective_averages_text_and_teacher_and_gives_the_teacher_no_gradient() -> None:
    ours, theirs = logits(1).requires_grad_(), logits(0).requires_grad_()
    weights = ObjectiveConfig.model_validate({"distill": {"teacher": "any", "weight": 0.25}})

    loss = distillation_loss(ours, theirs, TARGETS != IGNORED_TARGET)
    found = objective(ours, TARGETS, {}, weights, distillation=loss)
    found.total.backward()

    assert found.distillation is not None
    assert found.distillation > 0
    torch.testing.assert_close(found.total, 0.75 * found.cross_entropy + 0.25 * found.distillation)
    assert theirs.grad is None
    assert found.detach().other_terms.keys() == {"distillation"}


def test_stored_answers_are_the_teachers_at_each_position(
    run_train: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_train(tmp_path, "--trainer.max_steps", "1").folder
    file = tmp_path / "answers.safetensors"

    done = run_here(str(run), "--store-answers", str(file), "--top", "7", program=EVALUATE)

    assert done.code == 0, done.stderr
    loaded = moe_ffn.load_run(run)
    tokens = torch.from_numpy(np.array(prepare(loaded.config.data).train, "int64"))
    assert f"{len(tokens) - 1:,} positions" in done.stdout
    stored = StoredAnswers(file, "teacher")
    assert (stored.top, stored.num_positions) == (7, len(tokens) - 1)
    starts = torch.tensor([0, 8, 32, len(tokens) - 17])
    found = stored.at(starts, 16)
    for row, start in enumerate(starts.tolist()):
        with torch.no_grad():
            logits_SV = loaded.model(tokens[None, start : start + 16]).logits[0]
        # Later windows answer what has half a window of context, and the last what is left.
        late = slice({0: 0, len(tokens) - 17: 15}.get(start, 8), 16)
        wanted = Answers.of(logits_SV[late], 7)
        torch.testing.assert_close(found.log_probs[row, late], wanted.log_probs, atol=1e-5, rtol=0)
        torch.testing.assert_close(found.log_rest[row, late], wanted.log_rest, atol=1e-5, rtol=0)
        assert (found.token_ids[row, late] == wanted.token_ids).float().mean() > 0.9  # but for ties


def test_batches_carry_the_starts_of_their_sequences() -> None:
    tokens = torch.randint(0, 50, (103,)).numpy()
    for index, rank in product(range(9), range(2)):  # three epochs
        batch = TrainBatches(tokens, 7, 4, seed=1, rank=rank, world_size=2)[index]
        assert batch.starts is not None
        for start, inputs in zip(batch.starts, batch.input_ids, strict=True):
            assert inputs.tolist() == tokens[start : start + 7].tolist()


def save_without_context(folder: Path) -> str:
    """Save a teacher whose answers depend on one token only, so that windows make no difference."""
    teacher = moe_ffn.load_pretrained(save(folder))
    with torch.no_grad():
        teacher.embedding.weight.mul_(30)  # its answers differ from token to token
        for number in range(teacher.config.num_layers):
            teacher.get_parameter(f"layers.{number}.attention.output.weight").zero_()
    moe_ffn.save_pretrained(teacher, folder, BytesTokenizer())
    return str(folder)


def test_a_run_learns_from_stored_answers_as_from_their_teacher(
    run_train: Any, tmp_path: Path
) -> None:
    teacher, file = save_without_context(tmp_path / "teacher"), tmp_path / "answers.safetensors"
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
    one = run_train(tmp_path / "one", "--objective.distill.teacher", teacher)
    assert one.code == 0, one.stderr
    config = str(one.folder / "config.yaml")
    store = (teacher, "--data", config, "--store-answers", str(file))

    done = run_here(*store, "--top", "257", program=EVALUATE)
    assert done.code == 0, done.stderr
    two = run_train(tmp_path / "two", "--objective.distill.teacher", str(file))

    assert two.code == 0, two.stderr
    assert f"teacher: {file}, the 257 likeliest tokens at " in two.stdout
    key = "train/distillation"
    losses = [[row[key] for row in run.rows if key in row] for run in (one, two)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-4)
    assert min(losses[0]) > 0.1

    assert run_here(*store, "--top", "3", program=EVALUATE).code == 0
    rejected = run_here("--resume", str(two.folder), "--trainer.max_steps", "8")
    assert rejected.code == 2
    assert (
        f"objective.distill.teacher: the answers in '{file}' have changed since" in rejected.stderr
    )


def test_stored_answers_do_not_overwrite_another_file(tmp_path: Path) -> None:
    run = finished_copy(tmp_path)
    weights = run / "model" / "model.safetensors"
    before = weights.read_bytes()

    done = run_here(str(run), "--store-answers", str(weights), program=EVALUATE)

    assert done.code == 2
    assert f"--store-answers: '{weights}' exists and is not a file of stored answers" in done.stderr
    assert weights.read_bytes() == before
    for _ in range(2):  # one of its own is replaced
        file = str(tmp_path / "answers.safetensors")
        assert run_here(str(run), "--store-answers", file, program=EVALUATE).code == 0
    alone = run_here(str(run), "--top", "3", program=EVALUATE)
    assert alone.code == 2
    assert (
        "--top: needs --store-answers; add --store-answers FILE, or leave --top out" in alone.stderr
    )


def test_an_interrupted_file_of_answers_leaves_nothing(tmp_path: Path) -> None:
    def parts() -> Iterator[Answers]:
        yield Answers.of(torch.randn(3, 8), 2)
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_answers(tmp_path / "answers.safetensors", 6, 2, {}, parts())
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"objective": {"distill": {"temperature": 2.0}}}, r"temperature \(2\) must be 1 for"),
        ({"model": {"causal": False}}, "predicts next tokens, but model.causal is false"),
        (
            {"data": {"validation_percent": 45}},
            "were stored for another training split of [0-9,]+ tokens; this run has",
        ),
        (
            {"data": {"tokenizer": {"type": "bpe", "vocab_size": 512}}},
            "were stored with another tokenizer than data.tokenizer",
        ),
        ({}, ""),
    ],
)
def test_answers_to_another_text_are_rejected(
    options: dict[str, Any], said: str, make_config: MakeConfig, tmp_path: Path
) -> None:
    file, usual = tmp_path / "answers.safetensors", prepare(make_config().data)
    about = digests_of(usual.tokenizer, usual.train)
    answers = Answers.of(torch.randn(len(usual.train) - 1, 257), 2)
    write_answers(file, len(usual.train) - 1, 2, about, [answers])
    distill = {"teacher": str(file), **options.get("objective", {}).get("distill", {})}
    config = make_config(**{**options, "objective": {"distill": distill}})
    if not said:
        assert isinstance(read_teacher(config, prepare(config.data)), StoredAnswers)
        return
    with pytest.raises(ConfigError, match=said):
        read_teacher(config, prepare(config.data))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--top", "300"), "--top (300) must not exceed the 257 tokens of"),
        (("--k", "1"), "--k: cannot be used with --store-answers"),
        (("--data", "a.txt"), "training split, which 'a.txt' does not have; give a config (.yaml)"),
        (("--store-answers", "answers.bin"), "'answers.bin' must end in .safetensors"),
    ],
)
def test_answers_that_cannot_be_stored_are_rejected(
    options: tuple[str, ...], said: str, tmp_path: Path
) -> None:
    file = str(tmp_path / "a.safetensors")
    done = run_here(str(trained()), "--store-answers", file, *options, program=EVALUATE)
    assert done.code == 2
    assert said in done.stderr
    assert not Path(file).exists()


def test_a_file_without_answers_is_rejected(
    make_config: MakeConfig, prepared: PreparedData, tmp_path: Path
) -> None:
    none = "holds no stored answers"
    tensors = {name: torch.zeros(4) for name in ("token_ids", "log_probs", "log_rest")}
    foreign = {"without metadata": save_tensors(tensors), "flat": save_tensors(tensors, {"a": "b"})}
    for content, said in (
        (None, "is not there; write one with"),
        (b"x", none),
        *((each, none) for each in foreign.values()),
    ):
        file = tmp_path / "a.safetensors"
        if content:
            file.write_bytes(content)
        config = make_config(objective={"distill": {"teacher": str(file)}})
        with pytest.raises(ConfigError, match=f"^objective.distill.teacher: '{file}' {said}"):
            read_teacher(config, prepared)


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


def test_a_decoder_as_teacher_has_the_temperature_of_the_run(
    make_config: MakeConfig, prepared: PreparedData, tmp_path: Path
) -> None:
    distill = {"teacher": save(tmp_path / "teacher"), "temperature": 3.0}
    teacher = read_teacher(make_config(objective={"distill": distill}), prepared)
    assert isinstance(teacher, DecoderTeacher)
    ours, ids = torch.randn(1, 3, 257), torch.tensor([[5, 6, 7]])
    counted = torch.tensor([[True, False, True]])
    expected = distillation_loss(ours, teacher.decoder(ids).logits, counted, 3.0)
    torch.testing.assert_close(teacher.loss(ours, ids, None, counted), expected)


def test_a_teacher_whose_logits_are_not_finite_is_named(run_train: Any, tmp_path: Path) -> None:
    folder = Path(save(tmp_path / "teacher"))
    teacher = moe_ffn.load_pretrained(folder)
    with torch.no_grad():
        teacher.embedding.weight.mul_(1e3)
        teacher.get_parameter("final_norm.weight").fill_(1e38)  # finite, but the product is not
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
    rejected = run_here("--resume", str(copy), "--trainer.max_steps", "8")
    assert rejected.code == 2
    assert f"the weights in '{teacher}' have changed since '{copy}' began" in rejected.stderr


def test_a_run_can_resume_with_another_teacher(run_train: Any, tmp_path: Path) -> None:
    first, second = save(tmp_path / "first"), save(tmp_path / "second", ffn="geglu")
    run = run_train(
        tmp_path, "--objective.distill.teacher", first, "--trainer.max_steps", "2"
    ).folder

    changed = ("--objective.distill.teacher", second, "--trainer.max_steps", "3")
    assert run_here("--resume", str(run), *changed).code == 0

    resumed = run_here("--resume", str(run), "--trainer.max_steps", "4")
    assert resumed.code == 0, resumed.stderr
    assert f"teacher: {second}, " in resumed.stdout


def test_a_model_initialised_from_its_teacher_has_zero_distillation_loss(
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
def test_a_teacher_that_predicts_something_else_is_rejected(
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
