"""Values that the loggers receive in a real fit of a few steps."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from moe_ffn.data.prepare import PreparedData, validation_batches
from moe_ffn.runs.assemble import build_module, make_callbacks, make_token_data
from moe_ffn.training.module import LanguageModel, LoadedBatch, TrainStepOutput
from moe_ffn.training.monitoring import callbacks, row_sums
from moe_ffn.training.monitoring.callbacks import SampleLog
from moe_ffn.training.monitoring.hardware import peak_memory
from moe_ffn.training.monitoring.row_sums import RoutingRowSums, routing_row
from moe_ffn.training.objective import Objective
from moe_ffn.training.parallel.layout import Layout
from tests.helpers.fitted import Fault, Fit, Fitted, MakeConfig

MOE = {"ffn": {"type": "moe", "num_experts": 4}}


# -- rows of training


@pytest.mark.parametrize("accumulate", [1, 2], ids=["plain", "accumulating 2"])
def test_a_row_is_the_mean_of_all_steps_since_the_last(fit: Fit, accumulate: int) -> None:
    fitted = fit(
        model=MOE, logging={"every_n_steps": 4}, trainer={"accumulate_grad_batches": accumulate}
    )

    rows = fitted.logger.named("train")
    assert [step for step, _ in rows] == [4, 6]
    assert len(fitted.spy.outputs) == 6 * accumulate
    parts = fitted.spy.outputs[: 4 * accumulate], fitted.spy.outputs[4 * accumulate :]
    for (_, row), part in zip(rows, parts, strict=True):
        losses = [output["objective"] for output in part]
        seen = {
            "loss": [loss.cross_entropy for loss in losses],
            "objective": [loss.total for loss in losses],
            "load_balance": [loss.balancing["load_balance"] for loss in losses],
            "router_z": [loss.balancing["router_z"] for loss in losses],
        }
        for name, values in seen.items():
            mean = torch.stack(values).mean().item()
            assert row[f"train/{name}"] == pytest.approx(mean, rel=1e-6), name


class Clock(Callback):
    """A clock that stands still but for what is waited for: a batch takes a second, a long one eight."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, long_batch: int | None = None) -> None:
        self.now, self.long_batch = 1e6, long_batch
        monkeypatch.setattr(callbacks.time, "perf_counter", lambda: self.now)
        for place, method, seconds in (
            (LanguageModel, "validation_step", 1e3),
            (SampleLog, "on_validation_end", 1e4),
            (RoutingRowSums, "close", 0.5),  # reading the values waits for the device
        ):
            monkeypatch.setattr(place, method, self._slow(getattr(place, method), seconds))

    def _slow(self, method: Callable[..., Any], seconds: float) -> Callable[..., Any]:
        @wraps(method)
        def slow(*args: Any, **kwargs: Any) -> Any:
            self.now += seconds
            return method(*args, **kwargs)

        return slow

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        self.now += 8 if batch_idx == self.long_batch else 1


def test_tokens_and_seconds_leave_validations_and_their_texts_out(
    fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, long_batch=4)

    fitted = fit(clock, logging={"every_n_steps": 3}, trainer={"accumulate_grad_batches": 2})

    # A row is of 6 batches of 4 sequences x 16 tokens, 6.5 seconds; the first has the long one.
    rows, steps = fitted.logger.named("train"), fitted.watchers.steps
    assert [(step, row["train/tokens"]) for step, row in rows] == [(3, 384), (6, 768)]
    rates = [row["train/tokens_per_second"] for _, row in rows]
    assert rates == pytest.approx([384 / 13.5, 384 / 6.5])
    assert [row["train/seconds"] for _, row in rows] == pytest.approx([13.5, 20])
    # The median: the long batch and the reading of the values are those of other steps.
    assert [row["train/step_seconds"] for _, row in rows] == pytest.approx([2, 2])
    assert steps.tokens_per_second == pytest.approx(768 / 20)
    batches = len(validation_batches(fitted.config.data, fitted.data))
    assert steps.validation_seconds == pytest.approx(2 * (1e3 * batches + 1e4))
    assert steps.peak_memory_bytes > 50e6, "torch takes more by itself"


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="only Linux says it there")
def test_the_peak_memory_is_in_bytes() -> None:
    status = Path("/proc/self/status").read_text()
    (kibibytes,) = (int(line.split()[1]) for line in status.splitlines() if "VmHWM" in line)
    found = peak_memory(torch.device("cpu"))
    assert found % 1024 == 0
    assert found > 0.99 * 1024 * kibibytes


def test_tokens_of_all_ranks_are_counted(
    make_config: MakeConfig, prepared: PreparedData, tmp_path: Path
) -> None:
    config = make_config(model={"ffn": "dense"}, logging={"every_n_steps": 100})
    steps = make_callbacks(config, prepared, tmp_path).steps
    module = build_module(config, prepared)
    ids = torch.zeros(4, 16, dtype=torch.int64)
    trainer: Any = SimpleNamespace(
        world_size=2, global_step=0, accumulate_grad_batches=1, max_steps=50
    )
    batch = LoadedBatch(index=0, input_ids=ids, target_ids=ids)

    steps.on_train_batch_end(trainer, module, module.training_step(batch, 0), batch, 0)

    assert steps.total_tokens == 2 * 64


@pytest.mark.parametrize(
    ("layout", "experts_per_rank"),
    [(Layout(data=2, expert=2), 2), (Layout(shard=4), 1), (Layout(data=4), 1)],
    ids=["data and expert", "shard", "data"],
)
def test_the_imbalance_of_ranks_is_of_those_that_divide_the_experts(
    make_config: MakeConfig,
    prepared: PreparedData,
    tmp_path: Path,
    layout: Layout,
    experts_per_rank: int,
) -> None:
    config = make_config(model=MOE)
    steps, module = (
        make_callbacks(config, prepared, tmp_path).steps,
        build_module(config, prepared),
    )
    module.layout = layout
    ids = torch.arange(64).view(4, 16)
    batch = LoadedBatch(index=0, input_ids=ids, target_ids=ids)
    module.batch_at = lambda _: batch
    trainer: Any = SimpleNamespace(
        world_size=4,
        global_step=1,
        max_steps=1,
        accumulate_grad_batches=1,
        is_global_zero=False,
        loggers=[],
        lightning_module=module,
        strategy=SimpleNamespace(reduce=lambda value, reduce_op: value),
    )

    steps.on_train_batch_end(trainer, module, module.training_step(batch, 0), batch, 0)

    found = steps.last_routing["layer_00"]
    of_ranks = found["load"].view(-1, experts_per_rank).sum(1)
    expected = len(of_ranks) * of_ranks.max().item() - 1
    assert found["rank_max_violation"].item() == pytest.approx(expected)


def test_a_row_resumed_on_two_ranks_is_exact(monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = torch.tensor([[0.1, 0.7], [0.3, 1.9]]), torch.tensor([[1.1, 0.01], [0.6, 0.3]])
    unbroken, first, second = ([callbacks._LossRowSums() for _ in range(2)] for _ in range(3))
    for rank in range(2):
        add_step(unbroken[rank], before[:, rank])
        add_step(first[rank], before[:, rank])
    for rank in range(2):

        def all_gather(values: list[Tensor], value: Tensor) -> None:
            for found, window in zip(values, first, strict=True):
                found.copy_(window.sums["loss"])

        fake = SimpleNamespace(
            is_initialized=lambda: True,
            get_world_size=lambda: 2,
            get_rank=lambda rank=rank: rank,
            all_gather=all_gather,
        )
        monkeypatch.setattr(row_sums, "distributed", fake)
        second[rank].load_state_dict(first[rank].state_dict())
        add_step(second[rank], after[:, rank])
        add_step(unbroken[rank], after[:, rank])

    for name in ("loss", "objective"):
        resumed, expected = (
            torch.stack([window.sums[name] for window in windows]) for windows in (second, unbroken)
        )
        assert torch.equal(resumed, expected), name


def add_step(window: callbacks._LossRowSums, losses: Tensor) -> None:
    """An optimizer step of so many batches, each of which has one number."""
    for loss in losses:
        objective = Objective(loss, loss, {})
        output = TrainStepOutput(loss=loss, objective=objective, routings={}, shared_shares={})
        window.add(output, tokens=1)
    window.end_step(taken=True)


class SaveAt(Callback):
    """Save a checkpoint at one step and continue."""

    def __init__(self, step: int, path: Path) -> None:
        self.step, self.path = step, path

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if trainer.global_step == self.step:
            trainer.save_checkpoint(self.path)


def test_a_resumed_run_continues_its_counts(
    fit: Fit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Tokens, seconds, skipped steps and alarms, of a row that is cut in two and of the whole run."""
    clock, cut, end = Clock(monkeypatch), tmp_path / "cut.ckpt", tmp_path / "end.ckpt"
    options: dict[str, Any] = {"model": {"ffn": "dense"}, "logging": {"every_n_steps": 4}}
    fault = Fault("embedding", math.nan, range(1, 2))

    unbroken = fit(clock, fault, SaveAt(3, cut), SaveAt(6, end), **options)
    clock.now += 1e6  # until somebody resumes it
    resumed = fit(clock, resume_from=cut, **options)
    finished = fit(clock, resume_from=end, **options)

    rows = unbroken.logger.named("train")
    assert [row["train/skipped_steps"] for _, row in rows] == [1, 0]
    assert resumed.logger.named("train") == rows
    assert finished.logger.named("train") == []
    for fitted in (unbroken, resumed, finished):
        steps = fitted.watchers.steps
        assert steps.tokens_per_second == pytest.approx(6 * 64 / (6 + 2 * 0.5))
        assert (steps.num_skipped, steps.alarm_log.num_alarms) == (1, 1)


def test_a_run_resumed_at_its_last_step_counts_only_its_validation(
    fit: Fit, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    clock, end = Clock(monkeypatch), tmp_path / "end.ckpt"
    unbroken = fit(clock, SaveAt(6, end))
    clock.now += 1e6  # until somebody resumes it

    resumed = fit(clock, resume_from=end)
    data = make_token_data(resumed.config, resumed.data)
    resumed.trainer.validate(resumed.module, datamodule=data, verbose=False)

    seconds = unbroken.watchers.steps.validation_seconds
    assert resumed.watchers.steps.validation_seconds == pytest.approx(seconds)


def test_callbacks_receive_detached_outputs(moe_fit: Fitted) -> None:
    output = moe_fit.spy.outputs[0]
    assert not output["objective"].total.requires_grad
    for routing in output["routings"].values():
        assert not routing.scores_TE.requires_grad
        assert not routing.weights_N.requires_grad


def test_a_row_has_one_key_for_a_load_and_none_for_nan() -> None:
    values = {
        "layer_03": {
            "entropy": torch.tensor(0.5),
            "load": torch.tensor([0.25, 0.75]),
            "coactivation": torch.eye(2),
        },
        "layer_12": {"capacity_used": torch.tensor(torch.nan), "dead_experts": torch.tensor(2)},
    }

    assert routing_row(values, prefix="validation/") == {
        "validation/routing/layer_03/entropy": 0.5,
        "validation/routing/layer_03/load": [0.25, 0.75],
        "validation/routing/layer_12/dead_experts": 2,
    }


# -- the gradient norm


def first_gradient_norm(fitted: Fitted) -> float:
    """Gradient norm of the first batch under the initial weights, computed by hand."""
    module = build_module(fitted.config, fitted.data)
    module.load_state_dict(fitted.start)
    data = make_token_data(fitted.config, fitted.data)
    data.trainer = fitted.trainer
    batch = data.train_dataloader().batches[0]
    loaded = LoadedBatch(index=0, input_ids=batch.input_ids, target_ids=batch.target_ids)
    module.training_step(loaded, 0)["loss"].backward()
    squares = [p.grad.square().sum() for p in module.parameters() if p.grad is not None]
    return float(torch.stack(squares).sum().sqrt())


@pytest.mark.parametrize("algorithm", ["norm", "value"])
@pytest.mark.parametrize("clip", [0.0, 1e-3], ids=["unclipped", "clipped"])
def test_gradient_norm_is_the_one_before_clipping(fit: Fit, algorithm: str, clip: float) -> None:
    fitted = fit(
        logging={"every_n_steps": 1},
        trainer={"gradient_clip_val": clip, "gradient_clip_algorithm": algorithm},
    )

    logged = fitted.logger.named("train")[0][1]["train/gradient_norm"]
    assert logged == pytest.approx(first_gradient_norm(fitted), rel=1e-5)
    seen = fitted.spy.clipped_norms[0]
    if clip == 0:
        assert seen == pytest.approx(logged)
    elif algorithm == "norm":
        assert seen == pytest.approx(clip, rel=1e-2)
    else:  # each number is at most `clip`, and many are
        assert 10 * clip < seen < logged


# -- validation


def test_the_last_validation_is_that_of_the_model_on_every_batch(moe_fit: Fitted) -> None:
    fitted = moe_fit
    model = fitted.module.decoder.eval()
    losses: list[Tensor] = []
    pairs = torch.zeros(4)
    with torch.no_grad():
        for batch in validation_batches(fitted.config.data, fitted.data):
            output = model(batch.input_ids)
            logits = output.logits.mT
            losses.append(
                torch.nn.functional.cross_entropy(logits, batch.target_ids, reduction="none")
            )
            ids = output.routings["layer_01"].expert_ids_N
            pairs += torch.bincount(ids, minlength=4)
    loss = torch.cat(losses)

    rows, found = fitted.logger.named("validation"), fitted.watchers.validation
    assert [step for step, _ in rows] == [3, 6]
    assert found.last_step == 6
    assert found.last == {
        name: rows[-1][1][f"validation/{name}"] for name in ("loss", "bits_per_byte")
    }
    assert found.last["loss"] == pytest.approx(loss.mean().item(), rel=1e-5)
    assert list(found.routing) == ["layer_00", "layer_01"]
    torch.testing.assert_close(found.routing["layer_01"]["load"], pairs / pairs.sum())
    # One loss for each window, in their order.
    torch.testing.assert_close(found.window_losses, loss.mean(1), rtol=1e-5, atol=1e-6)


# -- randomness


def draws(module: LanguageModel, index: int) -> Tensor:
    torch.rand(7)  # whatever came before
    ids = torch.zeros(1, 1, dtype=torch.int64)
    module.on_train_batch_start(LoadedBatch(index=index, input_ids=ids, target_ids=ids), 0)
    return torch.rand(3)


def test_randomness_depends_on_seed_batch_and_rank_and_on_nothing_before(
    make_config: MakeConfig, prepared: PreparedData, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = build_module(make_config(), prepared)
    other = build_module(make_config().model_copy(update={"seed": 1}), prepared)
    first = draws(module, 5)

    assert torch.equal(draws(module, 5), first)
    assert not torch.equal(draws(module, 6), first)
    assert not torch.equal(draws(other, 5), first)
    monkeypatch.setattr(LanguageModel, "global_rank", 1)
    assert not torch.equal(draws(module, 5), first)
