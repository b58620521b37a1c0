"""Each alarm, caused in a real run."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback

from moe_ffn.training.module import LanguageModel
from tests.helpers.faults import Fault
from tests.helpers.fitted import Fit, Fitted

EARLY = {"every_n_steps": 1, "alarms": {"after_steps": 3}}
# Sixty-four tokens never spread evenly over a router that has seen six steps.
UNLESS_ALL_GO_ONE_WAY = {
    "every_n_steps": 1,
    "alarms": {"after_steps": 3, "max_violation_share": 1.0},
}


class Saboteur(Callback):
    """Multiplies a weight before a batch."""

    def __init__(self, weight: str, factor: float, at: int) -> None:
        self.weight, self.factor, self.at = weight, factor, at

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int
    ) -> None:
        assert isinstance(pl_module, LanguageModel)
        if trainer.global_step == self.at:
            with torch.no_grad():
                pl_module.decoder.get_parameter(self.weight).mul_(self.factor)


def alarms_of(fitted: Fitted, capsys: pytest.CaptureFixture[str]) -> list[tuple[str, int, Any]]:
    """(kind, step, layer) of what the run's record holds, which is what the console said too."""
    alarm_log = fitted.watchers.steps.alarm_log
    kept = [json.loads(line) for line in alarm_log.file.path.read_text().splitlines()]
    said = [line for line in capsys.readouterr().err.splitlines() if line.startswith("alarm: ")]
    assert len(said) == len(kept) == alarm_log.num_alarms
    for alarm in kept:
        place = "" if alarm["layer"] is None else f"{alarm['layer']}: "
        line = f"alarm: step {alarm['step']}: {place}{alarm['message']}; {alarm['advice']}"
        assert line in said
    return [(alarm["kind"], alarm["step"], alarm["layer"]) for alarm in kept]


def test_a_healthy_run_raises_no_alarm(fit: Fit) -> None:
    moe = {"type": "moe", "num_experts": 4}
    fitted = fit(model={"ffn": moe}, logging=UNLESS_ALL_GO_ONE_WAY, optimizer={"type": "adamw"})
    assert fitted.watchers.steps.alarm_log.num_alarms == 0
    assert not fitted.watchers.steps.alarm_log.file.path.exists()


def test_collapse_dead_experts_dropping_and_a_loss_spike(
    fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
    router = {"type": "forced", "k": 1, "skew": 1.0}
    moe = {"type": "moe", "num_experts": 4, "router": router, "capacity": {"factor": 1.0}}

    sabotage = Saboteur("embedding.weight", 300.0, at=7)

    # A loss that many times too high would be skipped.
    trainer = {"max_steps": 9, "guard": {"max_loss_ratio": None}}
    model = {"ffn": "dense", "ffn_at": {"1": moe}}
    fitted = fit(sabotage, model=model, logging=EARLY, trainer=trainer)

    assert alarms_of(fitted, capsys) == [
        ("dead_experts", 3, "layer_01"),
        ("collapse", 3, "layer_01"),
        ("dropped", 3, "layer_01"),
        ("loss_spike", 8, None),
    ]
    row = fitted.logger.named("train")[-1][1]
    assert row["routing/layer_01/dead_experts"] == 3
    assert row["routing/layer_01/load"] == [1, 0, 0, 0]


def test_router_logits_that_are_no_numbers(fit: Fit, capsys: pytest.CaptureFixture[str]) -> None:
    sabotage = Fault("layers.1.attention_norm", float("nan"), range(2, 3))
    moe = {"type": "moe", "num_experts": 4}

    fitted = fit(
        sabotage, model={"ffn": moe}, logging=UNLESS_ALL_GO_ONE_WAY, trainer={"max_steps": 3}
    )

    # What stands before the sabotage is whole; the loss is not, so the step is skipped.
    assert alarms_of(fitted, capsys) == [
        ("skipped_step", 3, None),
        ("nonfinite_logits", 3, "layer_01"),
    ]
