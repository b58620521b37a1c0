"""Steps with NaN or infinite numbers in a real fit: their effects and their log messages.

`tests/reliability/test_bad_numbers.py` breaks every place in turn.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision.amp import MixedPrecision
from torch import Tensor

from moe_ffn.data.prepare import PreparedData
from moe_ffn.runs.assemble import build_module, build_trainer, make_callbacks, make_token_data
from moe_ffn.runs.config import TrainConfig
from moe_ffn.training import module as module_file
from moe_ffn.training.monitoring.progress import status
from moe_ffn.training.objective import Objective
from moe_ffn.training.parallel.layout import SINGLE_PROCESS
from moe_ffn.training.recovery.guard import Diverged
from tests.helpers.first_gradient import fit as fit_on
from tests.helpers.fitted import Fault, Fit, MakeConfig
from tests.helpers.ranks import on_ranks
from tests.helpers.same_run import assert_same

BIASED = {"type": "moe", "num_experts": 4, "router": "sigmoid_top_k"}
ROUTER = "layers.1.ffn.router.projection"


class Watcher(Callback):
    """Record everything that training changes, after every step."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
    ) -> None:
        if trainer.global_step > len(self.weights):
            state = {name: value.clone() for name, value in pl_module.state_dict().items()}
            self.weights.append(state)

    def moved(self, step: int) -> set[str]:
        before, after = self.weights[step - 2], self.weights[step - 1]
        return {name for name in after if not torch.equal(before[name], after[name])}


class HalfPrecision(Callback):
    """float16 with its scaler, on the CPU; keeps the scale of every step."""

    def __init__(self, scale: float) -> None:
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        self.scales: list[float] = []

    def setup(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        plugin = MixedPrecision("16-mixed", "cpu", self.scaler)
        trainer.strategy.precision_plugin = plugin

    def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self.scales.append(self.scaler.get_scale())


def test_an_interrupted_step_is_forgotten(
    make_config: MakeConfig, prepared: PreparedData, tmp_path: Path
) -> None:
    class Interrupt(Callback):
        def on_train_batch_end(self, *args: Any, **kwargs: Any) -> None:
            raise ConnectionAbortedError

    config = make_config(
        model={"ffn": BIASED}, trainer={"max_steps": 1, "accumulate_grad_batches": 2}
    )
    found: list[tuple[Any, dict[str, Tensor]]] = []
    for fits in ([[Interrupt()], []], [[]]):
        torch.manual_seed(0)
        module = build_module(config, prepared)
        for more in fits:
            watchers = make_callbacks(config, prepared, tmp_path)
            trainer: Any = build_trainer(config, tmp_path, "32-true", [], watchers)
            trainer.callbacks += more
            with pytest.raises(ConnectionAbortedError) if more else nullcontext():
                trainer.fit(module, datamodule=make_token_data(config, prepared))
        found.append((module.guard.state_dict(), module.state_dict()))

    (guard, weights), (unbroken, expected) = found
    assert guard == unbroken
    assert_same(weights, expected, "weights")


def test_a_step_is_repeated_with_its_randomness(fit: Fit) -> None:
    class Outputs(Callback):
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

        def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
            pl_module.decoder.unembedding.register_forward_hook(self.keep)  # pyright: ignore[reportAttributeAccessIssue]

        def keep(self, module: torch.nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
            if module.training:
                self.seen.append(output.detach())

    outputs = Outputs()
    fit(
        *(outputs, Fault("layers.0.attention_norm.weight", math.nan, range(7, 8))),
        model={"ffn": {**BIASED, "router": "noisy_top_k"}, "dropout": 0.5},
        trainer={"accumulate_grad_batches": 2, "max_steps": 5},
    )

    # Batches 6 and 7 make up the step; after them come the same two again, then 8 and 9.
    assert len(outputs.seen) == 12
    for batch in (6, 7):
        assert torch.equal(outputs.seen[batch], outputs.seen[batch + 2])
    assert not torch.equal(outputs.seen[8], outputs.seen[9])


def test_a_row_covers_the_taken_steps(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    fault = Fault("embedding", math.nan, range(1, 4))

    fitted = fit(fault, model={"ffn": BIASED}, logging={"every_n_steps": 2})

    assert fault.num_strikes == 3 + 1, "the first once more, to find where it began"
    rows = [row for _, row in fitted.logger.named("train")]
    assert [row["train/skipped_steps"] for row in rows] == [1, 2, 0]
    taken = fitted.spy.outputs[0]["objective"]
    assert rows[0]["train/loss"] == pytest.approx(taken.cross_entropy.item())
    assert all(math.isfinite(rows[0][f"train/{name}"]) for name in ("objective", "router_z"))
    assert math.isnan(rows[1]["train/loss"]), "none of its steps was taken"
    assert "skipped 3" in status(fitted.watchers.steps)
    (said,) = (line for line in capsys.readouterr().err.splitlines() if ": skipped" in line)
    assert said.startswith(
        "alarm: step 2: skipped (1 in a row, 10 end the run): its loss is nan, which began in "
        "decoder.embedding; if it recurs, lower optimizer.learning_rate"
    )


def test_a_loss_too_high_is_skipped_without_looking_for_a_layer(
    fit: Fit, monkeypatch: pytest.MonkeyPatch
) -> None:
    fault = Fault("loss", 100.0, range(6, 7))
    monkeypatch.setattr(module_file, "objective", fault.objective(module_file.objective))

    fitted = fit(fault, model={"ffn": "dense"}, trainer={"max_steps": 8})

    assert fitted.module.guard.num_skipped == fault.num_strikes == 1
    record = fitted.watchers.steps.alarm_log.file.path.read_text()
    assert "times the median of the steps before" in record
    assert "began" not in record


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # scaler skips the first
def test_the_search_for_a_float16_scale_is_no_problem(fit: Fit) -> None:
    half, watcher = HalfPrecision(2.0**26), Watcher()

    fitted = fit(
        *(half, watcher),
        model={"ffn": BIASED},
        trainer={"max_steps": 14, "guard": {"max_skipped_in_a_row": 1}},
    )

    # Halved until the gradients fit, and no bias moves on what no step is made of.
    steps = range(2, 15)
    halved = [half.scales[step - 1] < half.scales[step - 2] for step in steps]
    assert halved[0]
    assert not halved[-1]
    assert [bool(watcher.moved(step)) for step in steps] == [not now for now in halved]
    assert fitted.module.guard.num_skipped == 0


def test_an_overflow_of_float16_is_found(fit: Fit) -> None:
    """A step is repeated in the precision that it had: no float16 is above 65504."""

    class Large(Callback):
        def on_train_batch_start(
            self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any
        ) -> None:
            if trainer.global_step == 2:
                pl_module.get_parameter("decoder.layers.1.ffn.down.weight").data.fill_(1e5)

    fitted = fit(*(HalfPrecision(1.0), Large()), model={"ffn": "dense"}, trainer={"max_steps": 4})

    assert fitted.module.guard.began_in == "decoder.layers.1.ffn.down"


def test_clipping_by_value_skips_the_step_too(fit: Fit) -> None:
    options = {"gradient_clip_algorithm": "value", "gradient_clip_val": 0.01}
    watcher = Watcher()
    fault = Fault("layers.0.attention_norm.weight", math.nan, range(2, 3))

    fitted = fit(fault, watcher, model={"ffn": "dense"}, trainer=options)

    assert fitted.module.guard.num_skipped == 1
    assert [bool(watcher.moved(step)) for step in (2, 3, 4)] == [True, False, True]


def test_too_many_in_a_row_raise_after_the_last_row(fit: Fit) -> None:
    rows: list[dict[str, Any]] = []

    class Rows(Callback):
        def on_exception(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
            rows.extend({"step": step, **row} for step, row in trainer.loggers[0].rows)  # pyright: ignore[reportAttributeAccessIssue]

    with pytest.raises(
        Diverged, match=r"^step 5: 3 steps in a row .* decoder\.layers\.1\.ffn"
    ) as info:
        fit(
            Rows(),
            Fault(ROUTER, math.nan, range(2, 9)),
            model={"ffn": BIASED},
            logging={"every_n_steps": 4},
            trainer={"max_steps": 9, "guard": {"max_skipped_in_a_row": 3}},
        )

    assert info.value.step == 5
    rows = [row for row in rows if "train/loss" in row]
    assert [row["step"] for row in rows] == [4, 5]
    assert [row["train/skipped_steps"] for row in rows] == [2, 1]


@pytest.mark.parametrize("limit", [1.0, 0.0], ids=["clipped", "not clipped"])
def test_an_overflowing_norm_differs_from_a_nonfinite_gradient(
    fit: Fit, capsys: pytest.CaptureFixture[str], limit: float
) -> None:
    class Large(Callback):
        def on_before_optimizer_step(
            self, trainer: Trainer, pl_module: LightningModule, optimizer: Any
        ) -> None:
            if trainer.global_step == 2:
                for parameter in pl_module.parameters():
                    assert parameter.grad is not None
                    parameter.grad.fill_(1e20)

    fitted = fit(Large(), trainer={"gradient_clip_val": limit})

    assert fitted.module.guard.num_skipped == 1
    said = capsys.readouterr().err
    assert "its gradient norm is inf, though every gradient is finite: the sum of their " in said
    assert "when the step was repeated" not in said


def faulty_on_a_rank(
    rank: int, config: TrainConfig, folder: Path, last: int
) -> tuple[dict[str, Tensor], dict[str, Any], list[str], dict[int, float]]:
    """Weights, guard, reasons and losses of a run in which step 3 has NaN on rank `last` and step 7 a loss
    1,000 times too high there.
    """
    reasons: list[str] = []
    losses: dict[int, float] = {}

    class Watch(Callback):
        factor = 1.0

        def on_train_batch_start(
            self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
        ) -> None:
            self.factor = 1000.0 if rank == last and trainer.global_step == 6 else 1.0

        def on_train_batch_end(
            self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            losses[batch["index"]] = outputs["objective"].total.item()
            if pl_module.skipped_step is not None and batch["index"] % 2:
                reasons.append(str(pl_module.skipped_step))

    watch, real = Watch(), module_file.objective

    def broken(*args: Any, **kwargs: Any) -> Objective:
        losses = real(*args, **kwargs)
        return replace(losses, total=losses.total * watch.factor)

    module_file.objective = broken
    try:
        fault = [Fault(ROUTER, math.nan, range(5, 6))] if rank == last else []
        module = fit_on(config, folder, SINGLE_PROCESS, watch, *fault)
    finally:
        module_file.objective = real
    weights = {name: value.clone() for name, value in module.state_dict().items()}
    return weights, module.guard.state_dict(), reasons, losses


def test_ranks_skip_the_steps_that_one_process_skips(
    make_config: MakeConfig, tmp_path: Path
) -> None:
    """Run on three ranks; a backward pass before the first step fixes the buckets of DDP."""

    def config(num_ranks: int) -> TrainConfig:
        return make_config(
            model={"ffn": BIASED},
            objective={"load_balance": 0.0, "load_balance_global": 0.1},
            optimizer={"type": "sgd", "learning_rate": 0.1},
            data={"batch_size": 6},
            trainer={
                "max_steps": 8,
                "accumulate_grad_batches": 2,
                "devices": num_ranks,
                "accelerator": "cpu",
            },
        )

    of_ranks = on_ranks(3, tmp_path / "ranks", faulty_on_a_rank, config(3), tmp_path, 2)
    expected, alone, *_ = faulty_on_a_rank(0, config(1), tmp_path, 0)

    assert alone["num_skipped"] == 2
    batches = [fmean(losses[n] for *_, losses in of_ranks) for n in range(16)]
    steps = [fmean(batches[n : n + 2]) for n in range(0, 16, 2)]
    for weights, guard, (first, second), _ in of_ranks:
        assert guard["num_skipped"] == 2
        assert guard["losses"] == pytest.approx(alone["losses"], rel=1e-5)
        assert guard["losses"] == pytest.approx([*steps[:2], *steps[3:6], steps[7]], rel=1e-5)
        assert first == f"its loss is nan, which began in decoder.{ROUTER}"
        assert second.startswith(f"its loss {steps[6]:.4g} is ")
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, msg=name, rtol=1e-4, atol=1e-5)
            assert torch.equal(weights[name], of_ranks[0][0][name]), name
