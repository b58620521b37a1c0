"""Each alarm, caused: by the figures of a row, and what it says."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn.training.alarm_bell import AlarmBell
from moe_ffn.training.alarms import Advice, Alarm, AlarmRules
from moe_ffn.training.config import AlarmsConfig, ObjectiveConfig, OptimizerConfig, TrainerConfig


@pytest.fixture
def rules() -> AlarmRules:
    advice = Advice(ObjectiveConfig(), OptimizerConfig(), TrainerConfig())
    return AlarmRules(AlarmsConfig(after_steps=20), advice)


def values(**replaced: Any) -> dict[str, Tensor]:
    """What is measured of a healthy layer of four experts, two of them for each token."""
    healthy: dict[str, Any] = {
        "load": [0.25] * 4,
        "max_violation": 0.0,
        "experts_per_token": 2.0,
        "dropped_fraction": 0.0,
        "nonfinite_tokens": 0,
        "logit_max": 3.0,
        "dead_experts": 0,
    }
    return {name: torch.tensor(value) for name, value in (healthy | replaced).items()}


def watch(rules: AlarmRules, *rows: dict[str, Tensor] | float, first: int = 10) -> list[Alarm]:
    """The alarms of rows of ten steps each; a number is a loss, a mapping the routing of layer 3."""
    alarms: list[Alarm] = []
    for number, row in enumerate(rows):
        step = first + 10 * number
        if isinstance(row, dict):
            alarms += rules.check(step, 10, 2.0, {"layer_03": row})
        else:
            alarms += rules.check(step, 10, row, {})
    return alarms


COLLAPSED = values(load=[0.48, 0.44, 0.04, 0.04], max_violation=0.92)
BALANCE = "raise objective.load_balance (now 0.01)"
RATE = "lower optimizer.learning_rate (now 0.003)"
CLIP = "trainer.gradient_clip_val (now 1)"

SINGLE: dict[str, tuple[dict[str, Tensor], str]] = {
    "nonfinite_logits": (
        values(nonfinite_tokens=7),
        f"step 10: layer_03: 7 tokens reached the router with NaN or infinity; something before it broke: "
        f"{RATE} or {CLIP}",
    ),
    "exploding_logits": (
        values(logit_max=83.25),
        f"step 10: layer_03: a router logit of 83.2 (limit 50); raise objective.router_z (now 0.001), or "
        f"{RATE}",
    ),
    "dead_experts": (
        values(dead_experts=2),
        f"step 10: layer_03: 2 of 4 experts had no token in 20 steps; {BALANCE}, take fewer experts, or a "
        "larger batch",
    ),
}


@pytest.mark.parametrize("kind", SINGLE)
def test_what_need_not_last_rings_at_once(rules: AlarmRules, kind: str) -> None:
    row, text = SINGLE[kind]
    (alarm,) = watch(rules, row)
    assert (alarm.kind, alarm.layer, alarm.step) == (kind, "layer_03", 10)
    assert str(alarm) == text


def test_collapse_rings_when_it_lasts(rules: AlarmRules) -> None:
    # At worst an expert of four has half of the pairs of k = 2: MaxVio 1; half of that is the limit.
    assert watch(rules, COLLAPSED) == []
    (alarm,) = watch(rules, COLLAPSED, first=20)
    assert alarm.kind == "collapse"
    assert str(alarm) == (
        "step 20: layer_03: expert 0 takes 48% of the pairs, MaxVio 0.92 (limit 0.50), for 20 steps; "
        f"{BALANCE}, or take router.type 'sigmoid_top_k', whose bias a rule balances"
    )


def test_dropping_rings_when_it_lasts(rules: AlarmRules) -> None:
    dropping = values(dropped_fraction=0.31)
    (alarm,) = watch(rules, dropping, dropping)
    assert alarm.kind == "dropped"
    assert str(alarm) == (
        "step 20: layer_03: 31% of the pairs are dropped (limit 20%), for 20 steps; "
        f"raise capacity.factor of the layer's ffn, or {BALANCE}"
    )


def test_what_passes_by_itself_is_no_alarm(rules: AlarmRules) -> None:
    assert watch(rules, COLLAPSED, values(), COLLAPSED, values(), COLLAPSED) == []


def test_a_row_that_covers_enough_steps_suffices(rules: AlarmRules) -> None:
    (alarm,) = rules.check(100, 100, 2.0, {"layer_00": COLLAPSED})
    assert alarm.message.endswith("for 100 steps")


def test_balance_of_one_expert_or_of_all_for_every_token_is_no_collapse(rules: AlarmRules) -> None:
    single = values(load=[1.0], experts_per_token=0.5)
    everybody = values(experts_per_token=4.0)
    assert watch(rules, single, single, everybody, everybody, everybody) == []


def test_a_loss_spike_is_measured_against_the_median_of_the_rows_before(rules: AlarmRules) -> None:
    (alarm,) = watch(rules, 3.0, 2.0, 2.2, 2.1, 2.0, 4.2)
    assert (alarm.kind, alarm.layer, alarm.step) == ("loss_spike", None, 60)
    assert str(alarm) == (
        "step 60: train/loss 4.200 is 2.00 times the median of the rows before, 2.100 (limit 1.3); "
        f"{RATE} or {CLIP}, or raise optimizer.schedule.warmup_fraction (now 0.05)"
    )


def test_a_loss_that_falls_or_wavers_is_none(rules: AlarmRules) -> None:
    assert watch(rules, 5.5, 4.0, 3.0, 2.5, 2.2, 2.4, 2.1, 2.6, 2.0) == []


def test_a_loss_that_is_no_number_is_told_at_once(rules: AlarmRules) -> None:
    (alarm,) = watch(rules, float("nan"))
    assert alarm.message == "train/loss is nan"


def test_a_trouble_rings_when_it_begins_and_not_while_it_lasts(rules: AlarmRules) -> None:
    broken = values(nonfinite_tokens=1)
    assert len(watch(rules, *[broken] * 50)) == 1
    # It comes and goes: one alarm. It was gone for longer than `after_steps`: another.
    assert watch(rules, values(), broken, first=510) == []
    assert len(watch(rules, values(), values(), values(), broken, first=530)) == 1


def test_layers_ring_each_for_itself(rules: AlarmRules) -> None:
    broken = values(logit_max=99.0)
    alarms = rules.check(10, 10, 2.0, {"layer_00": broken, "layer_01/inner": broken})
    assert [alarm.layer for alarm in alarms] == ["layer_00", "layer_01/inner"]


# -- the bell


@pytest.fixture
def alarm() -> Alarm:
    return Alarm(30, "loss_spike", None, "train/loss is nan", "lower it")


def test_the_bell_prints_keeps_and_tells_wandb(
    alarm: Alarm,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told: list[tuple[object, str, str]] = []
    monkeypatch.setattr(
        "moe_ffn.training.alarm_bell.alert",
        lambda loggers, title, text: told.append((loggers, title, text)),
    )
    bell = AlarmBell(tmp_path / "alarms.jsonl")

    bell.ring([], loggers=[])
    assert not bell.path.exists()
    bell.ring([alarm], loggers=[])
    bell.ring([alarm], loggers=[])

    text = "step 30: train/loss is nan; lower it"
    assert capsys.readouterr().err == f"alarm: {text}\n" * 2
    assert told == [([], "loss spike", text)] * 2
    lines = [json.loads(line) for line in bell.path.read_text().splitlines()]
    assert lines == [alarm.to_dict()] * 2
    assert lines[0] == {
        "step": 30,
        "kind": "loss_spike",
        "layer": None,
        "message": "train/loss is nan",
        "advice": "lower it",
    }
    assert bell.num_alarms == 2


def test_a_bell_that_cannot_write_still_prints(
    alarm: Alarm, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    AlarmBell(tmp_path / "gone" / "alarms.jsonl").ring([alarm], loggers=[])

    assert capsys.readouterr().err.splitlines() == [
        "alarm: step 30: train/loss is nan; lower it",
        f"alarm: '{tmp_path}/gone/alarms.jsonl' cannot be written (No such file or directory)",
    ]
