from __future__ import annotations

from typing import Any

import pytest
from torch import nn

from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.training.optimizer import AdamWConfig, build_schedule, split_by_decay
from moe_ffn.training.schedule import CosineConfig, ScheduleConfig, WSDConfig


def build(**options: Any) -> nn.Module:
    config = DecoderConfig.model_validate(
        {"d_model": 8, "num_layers": 1, "attention": {"num_heads": 2}, **options}
    )
    return config.build(vocab_size=11, max_seq_len=5)


def groups(**options: Any) -> tuple[set[str], set[str]]:
    decayed, kept = split_by_decay(build(**options))
    return set(decayed), set(kept)


ATTENTION = {f"layers.0.attention.{name}.weight" for name in ("query", "key", "value", "output")}
NORMS = {"layers.0.attention_norm.weight", "layers.0.ffn_norm.weight", "final_norm.weight"}


# -- what decays


def test_matrices_decay_stacked_experts_and_router_too() -> None:
    decayed, kept = groups(ffn={"type": "moe", "num_experts": 4})

    ffn = {f"layers.0.ffn.experts.{name}" for name in ("gate_up", "down")}
    assert decayed == ATTENTION | ffn | {"layers.0.ffn.router.projection.weight"}
    assert kept == NORMS | {"embedding.weight"}


def test_biases_do_not_decay_stacked_ones_neither() -> None:
    decayed, kept = groups(
        ffn={"type": "moe", "num_experts": 4, "experts": {"type": "swiglu", "bias": True}},
        attention={"num_heads": 2, "bias": True},
        norm="layer_norm",
    )

    assert not [name for name in decayed if "bias" in name]
    assert {f"layers.0.ffn.experts.{name}_bias" for name in ("gate_up", "down")} <= kept
    assert {name.replace("weight", "bias") for name in ATTENTION | NORMS} <= kept


@pytest.mark.parametrize(
    ("options", "decays", "keeps"),
    [
        ({"tie_embeddings": True}, set(), {"embedding.weight"}),
        ({"tie_embeddings": False}, {"unembedding.weight"}, {"embedding.weight"}),
        ({"positions": "learned"}, set(), {"positions.table.weight"}),
        (
            {"ffn": {"type": "conv", "bias": True}},
            {"layers.0.ffn.up.linear.weight", "layers.0.ffn.down.linear.weight"},
            {"layers.0.ffn.up.linear.bias", "layers.0.ffn.down.linear.bias"},
        ),
    ],
    ids=["tied", "untied", "learned positions", "convolutions"],
)
def test_matrices_decay_and_embeddings_do_not(
    options: dict[str, Any], decays: set[str], keeps: set[str]
) -> None:
    decayed, kept = groups(**options)

    assert decayed >= decays
    assert kept >= keeps
    assert ("unembedding.weight" in decayed | kept) == (options.get("tie_embeddings") is False)


# -- schedules

COSINE = CosineConfig(warmup_fraction=0.1, final_fraction=0.1)


@pytest.mark.parametrize("schedule", [CosineConfig(), WSDConfig()], ids=["cosine", "wsd"])
@pytest.mark.parametrize("max_steps", [1, 2, 7, 600])
def test_multiplier_never_leaves_its_range(schedule: ScheduleConfig, max_steps: int) -> None:
    rates = [schedule.multiplier(step, max_steps) for step in range(max_steps + 1)]

    assert all(0 < rate <= 1 for rate in rates)
    assert rates[-1] == pytest.approx(0.1)
    peak = rates.index(max(rates))
    assert rates[: peak + 1] == sorted(rates[: peak + 1])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)


def test_the_optimizer_follows_the_schedule_in_every_group() -> None:
    config = AdamWConfig(learning_rate=2.0, schedule=COSINE)
    optimizer = config.build(build())
    schedule = build_schedule(optimizer, config, max_steps=100)

    seen = []
    for _ in range(12):
        rates = [group["lr"] for group in optimizer.param_groups]
        assert rates[0] == rates[1]
        seen.append(rates[0])
        optimizer.step()
        schedule.step()

    assert (seen[0], seen[9], seen[10]) == pytest.approx((2 / 11, 20 / 11, 2.0))
    assert seen[11] < 2.0
