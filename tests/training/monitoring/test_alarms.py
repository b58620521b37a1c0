"""Alarms and their messages, caused by the figures of a row and in real runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning import LightningModule, Trainer
from lightning.pytorch.callbacks import Callback
from torch import Tensor

from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.training.config import TrainerConfig
from moe_ffn.training.module import LanguageModel
from moe_ffn.training.monitoring.alarms import Advice, AlarmRules
from moe_ffn.training.monitoring.json_lines import Alarm
from moe_ffn.training.monitoring.loggers import AlarmLog
from moe_ffn.training.objective import ObjectiveConfig
from moe_ffn.training.optimizer import AdamWConfig
from tests.helpers.fitted import RATE, Fault, Fit, Fitted, make_rules


@pytest.fixture
def rules() -> AlarmRules:
    return make_rules()


def values(**replaced: Any) -> dict[str, Tensor]:
    """Measurements of a healthy layer of four experts, two per token."""
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
BALANCE = (
    "raise objective.load_balance (now 0.01), or use model.ffn.router.type 'sigmoid_top_k', which "
    "balances with a bias"
)

SINGLE: dict[str, tuple[dict[str, Tensor], str]] = {
    "nonfinite_logits": (
        values(nonfinite_tokens=7),
        f"step 10: layer_03: 7 tokens reached the router with NaN or infinity; "
        f"an earlier layer produced NaN or infinity; "
        f"{RATE}",
    ),
    "exploding_logits": (
        values(logit_max=83.25),
        f"step 10: layer_03: a router logit of 83.2 (limit 50); raise objective.router_z (now 0.001), or "
        f"{RATE}",
    ),
    "dead_experts": (
        values(dead_experts=2),
        f"step 10: layer_03: 2 of 4 experts had no token in 20 steps; {BALANCE}, or take fewer experts "
        "or a larger batch",
    ),
}


@pytest.mark.parametrize("kind", SINGLE)
def test_single_problems_raise_an_alarm_at_once(rules: AlarmRules, kind: str) -> None:
    row, text = SINGLE[kind]
    (alarm,) = watch(rules, row)
    assert (alarm.kind, alarm.layer, alarm.step) == (kind, "layer_03", 10)
    assert str(alarm) == text


DROPPING = values(dropped_fraction=0.31)
LASTING = {
    # At worst an expert of four has half of the pairs of k = 2: MaxVio 1; half of that is the limit.
    "collapse": (
        COLLAPSED,
        "step 20: layer_03: expert 0 takes 48% of the pairs, MaxVio 0.92 (limit 0.50), for 20 steps; "
        f"{BALANCE}",
    ),
    "dropped": (
        DROPPING,
        "step 20: layer_03: 31% of the pairs are dropped (limit 20%), for 20 steps; "
        f"raise model.ffn.capacity.factor, or balance better: {BALANCE}",
    ),
}


@pytest.mark.parametrize("kind", LASTING)
def test_problems_that_last_raise_an_alarm(rules: AlarmRules, kind: str) -> None:
    row, text = LASTING[kind]
    assert watch(rules, row) == []
    (alarm,) = watch(rules, row, first=20)
    assert (alarm.kind, str(alarm)) == (kind, text)


def test_passing_problems_are_no_alarm(rules: AlarmRules) -> None:
    assert watch(rules, COLLAPSED, values(), COLLAPSED, values(), COLLAPSED) == []


def test_a_row_that_covers_enough_steps_suffices(rules: AlarmRules) -> None:
    (alarm,) = rules.check(100, 100, 2.0, {"layer_00": COLLAPSED})
    assert alarm.message.endswith("for 100 steps")


@pytest.mark.parametrize(
    "row",
    [
        values(load=[1.0], experts_per_token=0.5),
        values(experts_per_token=4.0),
        # 7.5 of 8 experts per token: MaxVio is 0.07 at worst.
        values(load=[0.12, 0.13] * 4, max_violation=0.06, experts_per_token=7.5),
    ],
    ids=["one expert", "all experts", "almost all experts"],
)
def test_unavoidable_imbalance_is_no_collapse(rules: AlarmRules, row: dict[str, Tensor]) -> None:
    assert watch(rules, row, row, row) == []


def test_experts_of_every_token_are_no_collapse_and_not_blamed_for_one(rules: AlarmRules) -> None:
    """Each token goes to the last two of six experts, and to one of the others."""
    rules.num_always = {"layer_03": 2}
    load = [0.20, 0.06, 0.05, 0.02, 1 / 3, 1 / 3]
    uneven = values(load=load, max_violation=1.4, experts_per_token=3.0)
    assert watch(rules, uneven, uneven, uneven) == []
    load = [0.30, 0.01, 0.01, 0.01, 1 / 3, 1 / 3]
    collapsed = values(load=load, max_violation=2.64, experts_per_token=3.0)
    (alarm,) = watch(rules, collapsed, collapsed)
    # 0.30 of 0.33 pairs of four experts; at worst all, so MaxVio is at most 4 / 1 - 1.
    assert alarm.message.startswith("expert 0 takes 30% of the pairs, MaxVio 2.64 (limit 1.50)")


def test_a_loss_spike_is_measured_against_the_median_of_the_rows_before(rules: AlarmRules) -> None:
    (alarm,) = watch(rules, 3.0, 2.0, 2.2, 2.1, 2.0, 4.2)
    assert (alarm.kind, alarm.layer, alarm.step) == ("loss_spike", None, 60)
    assert str(alarm) == (
        "step 60: train/loss 4.200 is 2.00 times the median of the rows before, 2.100 (limit 1.3); "
        f"{RATE}, or raise optimizer.schedule.warmup_fraction (now 0.05)"
    )


@pytest.mark.parametrize(
    "losses", [[5.5, 4.0, 3.0, 2.5, 2.2, 2.4, 2.1, 2.6, 2.0], [0.0, 0.0, 0.0, 0.0, 0.0, 0.1]]
)
def test_a_falling_or_wavering_loss_is_no_spike(rules: AlarmRules, losses: list[float]) -> None:
    assert watch(rules, *losses) == []


def test_a_row_without_a_loss_is_skipped(rules: AlarmRules) -> None:
    # None of its steps was taken, which is an alarm of its own: test_stopping.py.
    assert watch(rules, float("nan"), 2.0, 2.0, float("nan"), 2.0, 2.0, 2.0, 2.5) == []
    assert len(watch(rules, float("nan"), 4.2)) == 1


def test_a_problem_is_an_alarm_when_it_begins_and_not_while_it_lasts(rules: AlarmRules) -> None:
    broken = values(nonfinite_tokens=1)
    assert len(watch(rules, *[broken] * 50)) == 1
    # It comes and goes: one alarm. It was gone for longer than `after_steps`: another.
    assert watch(rules, values(), broken, first=510) == []
    assert len(watch(rules, values(), values(), values(), broken, first=530)) == 1


def test_a_lasting_problem_is_one_alarm_for_rows_of_any_length(rules: AlarmRules) -> None:
    dead = values(dead_experts=1)
    raised = [rules.check(step, 100, 2.0, {"layer_00": dead}) for step in range(100, 700, 100)]
    assert [len(alarms) for alarms in raised] == [1, 0, 0, 0, 0, 0]


@pytest.mark.parametrize(
    ("before", "then"),
    [
        ([COLLAPSED], [COLLAPSED]),
        ([values(dead_experts=1)], [values(dead_experts=1)]),
        ([2.0] * 5, [4.0]),
    ],
    ids=["it lasted", "it was seen", "losses"],
)
def test_resumed_rules_raise_the_same_alarms(before: list[Any], then: list[Any]) -> None:
    unbroken, resumed = make_rules(), make_rules()
    watch(unbroken, *before)
    resumed.load_state_dict(json.loads(json.dumps(unbroken.state_dict())))

    first = 10 + 10 * len(before)
    found, expected = (watch(rules, *then, first=first) for rules in (resumed, unbroken))

    assert found == expected
    assert found != watch(make_rules(), *then, first=first), "it remembered nothing"


CAPACITY = {"type": "moe", "capacity": {"factor": 1.25}}
ADVICE: dict[str, tuple[dict[str, Any], str, dict[str, Tensor], str]] = {
    "bias": (
        {"ffn": {"type": "moe", "router": "sigmoid_top_k"}},
        "layer_03",
        COLLAPSED,
        "raise objective.bias_rule.rate (now 0.001)",
    ),
    "forced": (
        {"ffn": {"type": "moe", "router": "forced"}},
        "layer_03",
        COLLAPSED,
        "choose another model.ffn.router.type than 'forced', which has nothing to learn",
    ),
    "table": (
        {"ffn": {"type": "moe", "router": {"type": "top_k", "token_table": {"vocab_size": 9}}}},
        "layer_03",
        COLLAPSED,
        "remove model.ffn.router.token_table, which fixes where tokens go",
    ),
    "one layer": (
        {"ffn": "dense", "ffn_at": {"3": "moe"}},
        "layer_03",
        COLLAPSED,
        BALANCE.replace("model.ffn", "model.ffn_at.3"),
    ),
    "a factor": (
        {"ffn": CAPACITY},
        "layer_03",
        DROPPING,
        f"raise model.ffn.capacity.factor (now 1.25), or balance better: {BALANCE}",
    ),
    "an unnamed router, collapsed": (
        {"ffn": "moe"},
        "layer_03/step_2",
        COLLAPSED,
        "raise objective.load_balance (now 0.01)",
    ),
    "an unnamed router, dropping": (
        {"ffn": "moe"},
        "layer_03/step_2",
        DROPPING,
        "raise the block's capacity, or balance better: raise objective.load_balance (now 0.01)",
    ),
    "inside a mixture of depths": (
        {
            "ffn": {"type": "mixture_of_depths", "ffn": CAPACITY | {"router": "hash"}},
            "causal": False,
        },
        "layer_03/inner",
        DROPPING,
        "raise model.ffn.ffn.capacity.factor (now 1.25), or balance better: choose another "
        "model.ffn.ffn.router.type than 'hash', which has nothing to learn",
    ),
}


@pytest.mark.parametrize(("model", "layer", "row", "advice"), ADVICE.values(), ids=ADVICE)
def test_advice_names_the_options_of_the_layer(
    model: dict[str, Any], layer: str, row: dict[str, Tensor], advice: str
) -> None:
    (alarm,) = make_rules(model).check(100, 100, 2.0, {layer: row})
    assert alarm.advice == advice


def test_advice_with_a_rule_that_has_no_rate_is_the_loss() -> None:
    model = DecoderConfig.model_validate({"ffn": {"type": "moe", "router": "sigmoid_top_k"}})
    objective = ObjectiveConfig.model_validate({"bias_rule": "quantile"})
    advice = Advice(model, objective, AdamWConfig(), TrainerConfig())
    assert advice.against("collapse", "layer_00") == "raise objective.load_balance (now 0.01)"


def test_each_layer_has_its_own_alarm(rules: AlarmRules) -> None:
    broken = values(logit_max=99.0)
    alarms = rules.check(10, 10, 2.0, {"layer_00": broken, "layer_01/inner": broken})
    assert [alarm.layer for alarm in alarms] == ["layer_00", "layer_01/inner"]


# -- the log of alarms


ALARM = Alarm(step=30, kind="loss_spike", message="train/loss is nan", advice="lower it")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[tuple[object, str, str]]:
    """Loggers, title and text of every alert."""
    alerts: list[tuple[object, str, str]] = []
    loggers = "moe_ffn.training.monitoring.loggers"
    monkeypatch.setattr(f"{loggers}.alert", lambda *given: alerts.append(given))
    return alerts


def test_an_alarm_is_logged_written_and_sent_to_wandb(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], told: list[tuple[object, str, str]]
) -> None:
    alarm_log = AlarmLog(tmp_path / "alarms.jsonl")

    alarm_log.report([], loggers=[])
    assert not alarm_log.file.path.exists()
    alarm_log.report([ALARM], loggers=[])
    alarm_log.report([ALARM], loggers=[])

    text = "step 30: train/loss is nan; lower it"
    assert capsys.readouterr().err == f"alarm: {text}\n" * 2
    assert told == [([], "loss spike", text)] * 2
    lines = [json.loads(line) for line in alarm_log.file.path.read_text().splitlines()]
    assert lines == [ALARM.model_dump()] * 2
    assert alarm_log.num_alarms == 2


def test_many_layers_are_one_line_and_one_alert(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], told: list[tuple[object, str, str]]
) -> None:
    layers = [f"layer_0{number}" for number in range(3)]
    about = {"step": 9, "kind": "collapse", "message": "too much", "advice": "raise it"}
    alarms = [Alarm.model_validate({**about, "layer": layer}) for layer in layers]
    alarm_log = AlarmLog(tmp_path / "alarms.jsonl")

    alarm_log.report(alarms, loggers=[])

    text = "alarm: step 9: layer_00: too much; raise it (and layer_01, layer_02)\n"
    assert capsys.readouterr().err == text
    assert [title for _, title, _ in told] == ["collapse, layer_00"]
    assert [
        json.loads(line)["layer"] for line in alarm_log.file.path.read_text().splitlines()
    ] == layers
    assert alarm_log.num_alarms == 3


def test_an_alarm_that_cannot_be_written_is_still_logged(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "alarms.jsonl"

    AlarmLog(path).report([ALARM], loggers=[])

    assert capsys.readouterr().err.splitlines() == [
        "alarm: step 30: train/loss is nan; lower it",
        f"disk: '{path}' cannot be written (File exists); training continues and tries again",
    ]


def test_alarms_that_need_more_steps_are_named(rules: AlarmRules) -> None:
    # These rules want 20 steps; rows are ten steps apart.
    watch(rules, values())
    assert rules.not_judged(10, is_routed=True) == [
        "collapse, dropped pairs and dead experts need 20 steps, this run has 10",
        "loss spikes need 6 rows of metrics, this run has 1",
    ]
    assert rules.not_judged(10, is_routed=False) == [
        "loss spikes need 6 rows of metrics, this run has 1"
    ]
    watch(rules, *[values()] * 4, first=20)
    assert rules.not_judged(50, is_routed=True) == [
        "loss spikes need 6 rows of metrics, this run has 5"
    ]
    watch(rules, values(), first=60)
    assert rules.not_judged(60, is_routed=True) == []
    assert rules.not_judged(20, is_routed=True) == []
    assert rules.not_judged(19, is_routed=True) != []


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
    """(kind, step, layer) of the alarms in the run's record, which match those on the console."""
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


def test_nonfinite_router_logits_raise_an_alarm(
    fit: Fit, capsys: pytest.CaptureFixture[str]
) -> None:
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
