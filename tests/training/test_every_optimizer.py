"""Properties of every optimizer, the parameters that decay, and schedules with hand-computed numbers."""

from __future__ import annotations

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR
from transformers import optimization

from moe_ffn.config.errors import explain
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.runs.config import TrainConfig
from moe_ffn.training.optimizer import (
    AdamWConfig,
    GroupedConfig,
    MuonConfig,
    OptimizerConfig,
    SGDConfig,
    build_schedule,
    replace_options,
    split_by_decay,
)
from moe_ffn.training.schedule import ScheduleConfig
from tests.helpers.cases import python_with
from tests.helpers.fitted import Fit
from tests.helpers.same_run import assert_same

MAX_STEPS = 40
TYPES = list(OptimizerConfig.members)
DECOUPLED = {"adamw", "adafactor", "muon"}
CHANGED: dict[str, dict[str, Any]] = {
    "adamw": {"betas": (0.5, 0.6), "eps": 1e-3},
    "adam": {"betas": (0.5, 0.6), "eps": 1e-3},
    "sgd": {"momentum": 0.5, "nesterov": True},
    "adafactor": {"beta2_decay": -0.5, "d": 2.0},
    "muon": {
        "momentum": 0.5,
        "nesterov": False,
        "ns_steps": 3,
        "adjust_lr_fn": "original",
        "adamw_learning_rate": 0.25,
        "adamw_betas": (0.5, 0.6),
        "adamw_eps": 1e-3,
    },
}
"""Another value for every option specific to an optimizer."""

every_type = pytest.mark.parametrize("tag", TYPES)


def make(tag: str, **options: Any) -> OptimizerConfig:
    return OptimizerConfig.model_validate({"type": tag, **options})


def build(seed: int = 0) -> nn.Module:
    """Stacked experts with biases, an untied output matrix, and norms."""
    torch.manual_seed(seed)
    experts = {"type": "swiglu", "bias": True}
    options = {
        "d_model": 16,
        "num_layers": 1,
        "attention": {"num_heads": 2},
        "ffn": {"type": "moe", "num_experts": 2, "experts": experts},
        "tie_embeddings": False,
    }
    return DecoderConfig.model_validate(options).build(vocab_size=8, max_seq_len=16)


class Learner:
    """A model that learns one sequence by heart, with clipping, as a run does."""

    def __init__(
        self,
        config: OptimizerConfig,
        max_steps: int = MAX_STEPS,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self.model = build(seed).to(dtype)
        self.config, self.max_steps = config, max_steps
        self.optimizer: Optimizer = config.build(self.model)
        self.schedule: LambdaLR = build_schedule(self.optimizer, config, max_steps)
        ids = torch.randint(8, (4, 17), generator=torch.Generator().manual_seed(1))
        self.input_ids, self.target_ids = ids[:, :-1], ids[:, 1:]

    def step(self, has_gradients: bool = True) -> float:
        logits = self.model(self.input_ids).logits.float()
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.target_ids.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        if not has_gradients:
            self.optimizer.zero_grad(set_to_none=True)
        self.optimizer.step()
        self.schedule.step()
        self.optimizer.zero_grad()
        return loss.item()

    def saved(self) -> dict[str, Any]:
        """State as a checkpoint stores it, read back from a file without running code."""
        file = io.BytesIO()
        values = {
            "state_dict": self.model.state_dict(),
            "optimizer_states": [self.optimizer.state_dict()],
            "lr_schedulers": [self.schedule.state_dict()],
        }
        torch.save(values, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def go_on_from(self, checkpoint: dict[str, Any]) -> None:
        replace_options(checkpoint, self.model, self.config, self.max_steps)
        self.model.load_state_dict(checkpoint["state_dict"])
        self.optimizer.load_state_dict(checkpoint["optimizer_states"][0])
        self.schedule.load_state_dict(checkpoint["lr_schedulers"][0])

    def options(self) -> list[dict[str, Any]]:
        """Options of its groups, without the parameters."""
        groups = self.optimizer.state_dict()["param_groups"]
        return [{k: v for k, v in group.items() if k != "params"} for group in groups]


def test_without_a_type_it_is_muon() -> None:
    assert OptimizerConfig.model_validate({"learning_rate": 0.5}) == MuonConfig(learning_rate=0.5)
    given = TrainConfig.model_validate({"optimizer": {"momentum": 0.5}}).optimizer
    assert given == MuonConfig(momentum=0.5)
    assert TrainConfig().optimizer == MuonConfig()


@every_type
def test_it_learns_with_its_own_rate(tag: str) -> None:
    learner = Learner(make(tag))
    losses = [learner.step() for _ in range(MAX_STEPS)]
    assert losses[0] == pytest.approx(2.08, abs=0.5), "log(8), more or less"
    assert losses[-1] < losses[0] - 0.2


@every_type
def test_matrices_decay_and_nothing_else(tag: str) -> None:
    learner = Learner(
        make(tag, learning_rate=0.01, weight_decay=0.5, schedule={"type": "constant"})
    )
    before = {name: p.detach().clone() for name, p in learner.model.named_parameters()}
    for parameter in learner.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    for group in learner.optimizer.param_groups:
        group["lr"] = 0.01

    learner.optimizer.step()

    decayed, kept = split_by_decay(learner.model)
    for name, parameter in kept.items():
        assert torch.equal(parameter, before[name]), name
    for name, parameter in decayed.items():
        now, then = parameter.detach(), before[name]
        if tag in DECOUPLED:
            torch.testing.assert_close(now, then * (1 - 0.01 * 0.5), msg=name)
        else:
            assert ((now - then) * then <= 0).all(), f"{name} moves away from zero"
            assert not torch.equal(now, then), name


@every_type
def test_without_gradients_nothing_moves(tag: str) -> None:
    learner = Learner(make(tag))
    learner.step()
    weights, state = learner.saved()["state_dict"], learner.saved()["optimizer_states"][0]["state"]

    learner.step(has_gradients=False)

    assert_same(learner.saved()["state_dict"], weights)
    assert_same(learner.saved()["optimizer_states"][0]["state"], state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@every_type
def test_resuming_is_exact(tag: str, dtype: torch.dtype) -> None:
    unbroken, first, second = (Learner(make(tag), seed=s, dtype=dtype) for s in (0, 0, 1))
    losses = [unbroken.step() for _ in range(6)]
    before = [first.step() for _ in range(3)]

    second.go_on_from(first.saved())

    assert before + [second.step() for _ in range(3)] == losses
    assert_same(second.saved(), unbroken.saved())
    assert {parameter.dtype for parameter in second.model.parameters()} == {dtype}


@every_type
def test_a_resumed_optimizer_obeys_the_new_options(tag: str) -> None:
    own = set(type(make(tag)).model_fields) - set(GroupedConfig.model_fields)
    assert set(CHANGED[tag]) == own, "every option has another value here"
    first = Learner(make(tag))
    for _ in range(3):
        first.step()
    schedule = {"type": "linear", "warmup_steps": 1}
    changed = make(tag, learning_rate=0.5, weight_decay=0.25, schedule=schedule, **CHANGED[tag])

    second = Learner(changed, max_steps=9)
    second.go_on_from(first.saved())

    fresh = Learner(changed, max_steps=9).options()
    for now, expected in zip(second.options(), fresh, strict=True):
        # Step 3 of 9, of which 1 is warm-up: a quarter of the fall to a tenth.
        rate = expected["initial_lr"] * (1 - 0.9 / 4)
        assert now == {**expected, "lr": pytest.approx(rate)}
    assert second.options() != first.options()
    second.step()


@every_type
def test_options_reach_the_optimizer(tag: str) -> None:
    config = make(tag, learning_rate=0.5, weight_decay=0.25, **CHANGED[tag])

    groups = config.build(build()).param_groups

    assert {group["weight_decay"] for group in groups} == {0.25, 0.0}
    assert groups[0]["lr"] == 0.5
    for name, value in CHANGED[tag].items():
        found = [group for group in groups if "num_fused" not in group]
        key = {"adamw_learning_rate": "lr"}.get(name, name.removeprefix("adamw_"))
        if tag == "muon" and not name.startswith("adamw_"):
            found = [group for group in groups if "num_fused" in group]
        assert found
        assert all(group[key] == value for group in found), name


def test_sgd_may_gain_momentum_when_resumed() -> None:
    first, second = Learner(SGDConfig(momentum=0.0)), Learner(SGDConfig(momentum=0.9), seed=1)
    first.step()
    second.go_on_from(first.saved())
    assert second.step() < first.step() + 0.1


@every_type
def test_a_run_is_trained_clipped_accumulated_and_reports_its_rate(fit: Fit, tag: str) -> None:
    fitted = fit(
        model={"ffn": {"type": "moe", "num_experts": 2}},
        optimizer={"type": tag, "schedule": {"type": "constant", "warmup_steps": 2}},
        trainer={"accumulate_grad_batches": 2, "max_steps": 4, "validate_every_n_steps": 4},
        logging={"every_n_steps": 1},
    )

    rate = fitted.config.optimizer.learning_rate
    rows = fitted.logger.named("train")
    assert [row["train/learning_rate"] for _, row in rows] == pytest.approx(
        [rate / 3, rate * 2 / 3, rate, rate]
    )
    assert fitted.module.guard.num_skipped == 0
    moved = [n for n, p in fitted.module.named_parameters() if not torch.equal(p, fitted.start[n])]
    assert len(moved) > 10
    assert max(fitted.spy.clipped_norms) <= 1.0001


# -- what decays


def decayed_and_kept(**options: Any) -> tuple[set[str], set[str]]:
    small = {"d_model": 8, "num_layers": 1, "attention": {"num_heads": 2}, **options}
    model = DecoderConfig.model_validate(small).build(vocab_size=11, max_seq_len=5)
    decayed, kept = split_by_decay(model)
    return set(decayed), set(kept)


ATTENTION = {f"layers.0.attention.{name}.weight" for name in ("query", "key", "value", "output")}
NORMS = {"layers.0.attention_norm.weight", "layers.0.ffn_norm.weight", "final_norm.weight"}
EXPERTS = {f"layers.0.ffn.experts.{name}" for name in ("gate_up", "down")}
BIASED = {
    "ffn": {"type": "moe", "num_experts": 4, "experts": {"type": "swiglu", "bias": True}},
    "attention": {"num_heads": 2, "bias": True},
    "norm": "layer_norm",
}


@pytest.mark.parametrize(
    ("options", "decays", "keeps"),
    [
        (
            {"ffn": {"type": "moe", "num_experts": 4}},
            ATTENTION | EXPERTS | {"layers.0.ffn.router.projection.weight"},
            NORMS,
        ),
        (
            BIASED,
            EXPERTS,
            {name.replace("weight", "bias") for name in ATTENTION | NORMS}
            | {f"{name}_bias" for name in EXPERTS},
        ),
        ({"tie_embeddings": True}, set(), {"embedding.weight"}),
        ({"tie_embeddings": False}, {"unembedding.weight"}, {"embedding.weight"}),
        ({"positions": "learned"}, set(), {"positions.table.weight"}),
        (
            {"ffn": {"type": "conv", "bias": True}},
            {"layers.0.ffn.up.linear.weight", "layers.0.ffn.down.linear.weight"},
            {"layers.0.ffn.up.linear.bias", "layers.0.ffn.down.linear.bias"},
        ),
    ],
    ids=["experts", "biases", "tied", "untied", "learned positions", "convolutions"],
)
def test_matrices_decay_and_biases_norms_and_embeddings_do_not(
    options: dict[str, Any], decays: set[str], keeps: set[str]
) -> None:
    decayed, kept = decayed_and_kept(**options)
    assert decayed >= decays
    assert kept >= keeps
    assert ("unembedding.weight" in decayed | kept) == (options.get("tie_embeddings") is False)


# -- the docs

GUIDE = Path(__file__).parents[2] / "docs" / "howto" / "optimizers.md"
DOCS = GUIDE.read_text(encoding="utf-8")


def test_the_docs_have_every_optimizer_and_its_defaults() -> None:
    rows = re.findall(r"^\| `(\w+)`[^|]*\| ([\d.]+) \| ([\d.]+) \| (.+?) \|", DOCS, re.MULTILINE)
    assert {tag: (float(rate), float(decay), kind) for tag, rate, decay, kind in rows} == {
        tag: (
            make(tag).learning_rate,
            make(tag).weight_decay,
            "decoupled" if tag in DECOUPLED else "in the gradient",
        )
        for tag in TYPES
    }


def test_the_docs_have_every_schedule() -> None:
    table = DOCS.partition("## Schedules")[2].partition("\n## ")[0]
    found = re.findall(r"^\| `(\w+)`", table, re.MULTILINE)
    assert sorted(found) == sorted(ScheduleConfig.members)


def test_a_custom_optimizer_is_named_by_its_file(fit: Fit, tmp_path: Path) -> None:
    """The one of the docs."""
    code = python_with("SignConfig", "docs/howto/custom_optimizer.md")
    (tmp_path / "my_optimizer.py").write_text(code)
    options = {"type": f"{tmp_path}/my_optimizer.py:SignConfig", "weight_decay": 0.5}

    fitted = fit(optimizer={**options, "learning_rate": 0.01, "schedule": "constant"})

    assert fitted.spy.rates == [0.01] * 6
    matrices, rest = fitted.trainer.optimizers[0].param_groups
    assert (matrices["weight_decay"], rest["weight_decay"]) == (0.5, 0.0)
    losses = [row["validation/loss"] for _, row in fitted.logger.named("validation")]
    assert losses[-1] < losses[0]


NUM_STEPS = 100
"""Steps of a run; the first 9 are warm-up here, so that the tenth has the peak rate."""


def schedule(**options: Any) -> ScheduleConfig:
    return ScheduleConfig.model_validate({"warmup_steps": 9, **options})


@pytest.mark.parametrize(
    ("options", "step", "expected"),
    [
        # 91 steps after warm-up. After 13 of them a seventh of 0.9 has gone.
        ({"type": "linear"}, 0, 0.1),
        ({"type": "linear"}, 8, 0.9),
        ({"type": "linear"}, 9, 1.0),
        ({"type": "linear"}, 22, 1 - 0.9 / 7),
        ({"type": "linear"}, 99, 1 - 0.9 * 90 / 91),
        ({"type": "linear"}, 100, 0.1),
        ({"type": "linear"}, 150, 0.1),
        ({"type": "inverse_sqrt", "warmup_steps": 0}, 3, 0.5),
        ({"type": "cosine", "warmup_steps": 0}, 0, 1.0),
        ({"type": "cosine", "final_fraction": 0.1}, 130, 0.1),
        ({"type": "cosine", "final_fraction": 1.0}, 100, 1.0),
        # Falls in the last fifth of 100 steps, from step 80 to 1/10.
        ({"type": "wsd", "warmup_steps": 0, "decay_fraction": 0.2}, 80, 1.0),
        ({"type": "wsd", "warmup_steps": 0, "decay_fraction": 0.2}, 90, 0.55),
        ({"type": "wsd", "warmup_steps": 0, "decay_fraction": 0.2}, 130, 0.1),
        ({"type": "wsd", "warmup_steps": 0, "decay_fraction": 1.0}, 50, 0.55),
    ],
    ids=str,
)
def test_the_multiplier_is_the_one_worked_by_hand(
    options: dict[str, Any], step: int, expected: float
) -> None:
    assert schedule(**options).multiplier(step, NUM_STEPS) == pytest.approx(expected)


def hugging_face(make: Callable[..., LambdaLR], **options: Any) -> Callable[[int], float]:
    """Schedule of transformers, shifted by one step: its step 0 has rate 0, and ours begins at its step 1."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    (multiplier,) = make(optimizer, num_warmup_steps=10, **options).lr_lambdas
    return lambda step: multiplier(step + 1)


WHOLE = {"num_training_steps": NUM_STEPS + 1}


@pytest.mark.parametrize(
    ("ours", "make", "options"),
    [
        ({"type": "constant"}, optimization.get_constant_schedule_with_warmup, {}),
        ({"type": "inverse_sqrt"}, optimization.get_inverse_sqrt_schedule, {}),
        (
            {"type": "linear", "final_fraction": 0.0},
            optimization.get_linear_schedule_with_warmup,
            WHOLE,
        ),
        (
            {"type": "cosine", "final_fraction": 0.0},
            optimization.get_cosine_schedule_with_warmup,
            WHOLE,
        ),
        (
            {"type": "cosine", "final_fraction": 0.1},
            optimization.get_cosine_with_min_lr_schedule_with_warmup,
            {**WHOLE, "min_lr_rate": 0.1},
        ),
        (
            # 13 of the 91 steps after warm-up.
            {"type": "wsd", "decay_fraction": 1 / 7, "final_fraction": 0.0},
            optimization.get_wsd_schedule,
            {**WHOLE, "num_decay_steps": 13, "decay_type": "linear"},
        ),
    ],
    ids=["constant", "inverse_sqrt", "linear", "cosine", "cosine to a tenth", "wsd"],
)
def test_the_multiplier_is_that_of_transformers(
    ours: dict[str, Any], make: Callable[..., LambdaLR], options: dict[str, Any]
) -> None:
    theirs = hugging_face(make, **options)
    for step in range(NUM_STEPS):
        assert schedule(**ours).multiplier(step, NUM_STEPS) == pytest.approx(theirs(step)), step


def test_steps_of_warm_up_do_not_depend_on_the_length_of_the_run() -> None:
    assert schedule(type="constant").multiplier(4, max_steps=10**6) == pytest.approx(0.5)
    fraction = ScheduleConfig.model_validate({"type": "constant", "warmup_fraction": 0.09})
    assert [fraction.num_warmup_steps(n) for n in (100, 1000)] == [9, 90]
    # The nearest number: 0.09 * 30 is 2.7, and in float64 0.29 * 100 is 28.999999999999996.
    assert fraction.num_warmup_steps(30) == 3
    larger = ScheduleConfig.model_validate({"type": "linear", "warmup_fraction": 0.29})
    assert larger.num_warmup_steps(100) == 29
    assert schedule(type="constant").warmup_option == "warmup_steps (now 9)"
    assert fraction.warmup_option == "warmup_fraction (now 0.09)"


@pytest.mark.parametrize("tag", ScheduleConfig.members)
def test_warm_up_in_steps_and_as_a_part_is_rejected(tag: str) -> None:
    schedule = {"type": tag, "warmup_steps": 9, "warmup_fraction": 0.1}
    with pytest.raises(ValidationError) as rejected:
        AdamWConfig.model_validate({"schedule": schedule})
    assert explain(rejected.value) == [
        "schedule: warmup_steps (9) and warmup_fraction (0.1) both set the length of the warm-up; leave "
        "warmup_steps null, or warmup_fraction at 0.05"
    ]
