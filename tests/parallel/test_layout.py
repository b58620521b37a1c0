"""The mesh that a run asks for, and what is said of one that its processes do not make."""

from __future__ import annotations

import pytest
import yaml

from moe_ffn.config.errors import ConfigError
from moe_ffn.parallel.layout import Layout, ParallelConfig
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.validate import check_layout
from tests.helpers.cases import answers


@pytest.mark.parametrize(
    ("options", "num_ranks", "layout"),
    [
        ({}, 4, Layout(data=4)),
        ({"expert": 2}, 2, Layout(expert=2)),
        ({"expert": 2}, 6, Layout(data=3, expert=2)),
        ({"data": 1, "shard": -1, "expert": 2}, 8, Layout(shard=4, expert=2)),
        ({"data": 2, "shard": 2, "expert": 2}, 8, Layout(data=2, shard=2, expert=2)),
    ],
)
def test_minus_one_is_the_rest(options: dict[str, int], num_ranks: int, layout: Layout) -> None:
    assert ParallelConfig.model_validate(options).layout(num_ranks) == layout


def test_sizes_must_multiply_to_the_number_of_processes() -> None:
    with pytest.raises(ConfigError) as raised:
        ParallelConfig(data=2, expert=2).layout(2)
    assert str(raised.value) == (
        "parallel: data (2) x shard (1) x expert (2) needs 4 processes, and this run has 2; give "
        "--trainer.devices 4, start it with torchrun --nproc-per-node 4, or change one of them"
    )
    with pytest.raises(ConfigError) as raised:
        ParallelConfig(expert=2).layout(3)
    assert str(raised.value) == (
        "parallel: shard (1) x expert (2) needs a multiple of 2 processes, and this run has 3; give "
        "--trainer.devices 2, start it with torchrun --nproc-per-node 2, or change one of them"
    )


REFUSED = """
{parallel: {expert: 4}, model: {ffn: {type: moe, num_experts: 6}}}
    model.ffn.num_experts (6) cannot be divided evenly among 4 ranks; change it or parallel.expert
{parallel: {expert: 4}, model: {ffn: {type: moe, num_experts: 2}}}
    model.ffn.num_experts (2) cannot be divided evenly among 4 ranks; change it or parallel.expert
{parallel: {expert: 2}, model: {ffn: swiglu}}
    parallel.expert (2) divides the experts that a router chooses from, but no layer has a router; use
    parallel.shard
{parallel: {shard: 2}, trainer: {strategy: ddp}}
    trainer.strategy (ddp) holds the whole model on each rank, but parallel divides it; leave one of them out
{parallel: {expert: 2}, model: {causal: false, ffn: {type: soft_moe, num_experts: 4}, ffn_at: {"0": moe}}}
    model.ffn.type 'soft_moe' sends every token to every expert; set parallel.expert to 1
{parallel: {expert: 2, shard: 2}, model: {ffn: {type: moe, num_experts: 2, experts: {type: mlp, d_ff: 27}}}}
    parallel.shard (2) must divide the 27 rows of an expert's 'up', because parallel.expert (2) leaves 1 of 2
    experts to 2 ranks; change one of them
{parallel: {shard: 4}, optimizer: {type: adafactor}}
    optimizer.type (adafactor) needs whole matrices, which parallel.shard and parallel.expert divide; use
    adamw or muon
"""


@pytest.mark.parametrize(("options", "sentence"), answers(REFUSED))
def test_weights_that_ranks_cannot_share_are_rejected(options: str, sentence: str) -> None:
    with pytest.raises(ConfigError) as raised:
        check_layout(TrainConfig.model_validate(yaml.safe_load(options)), 4, "32-true")
    assert str(raised.value) == sentence


def test_an_expert_is_cut_only_where_a_rank_has_none_of_its_own() -> None:
    experts = {"type": "mlp", "d_ff": 27}
    ffn = {"type": "moe", "num_experts": 4, "experts": experts}  # two for each of two
    options = {"parallel": {"expert": 2, "shard": 2}, "model": {"ffn": ffn}}
    layout = check_layout(TrainConfig.model_validate(options), 4, "32-true")
    assert layout == Layout(shard=2, expert=2)


def test_float64_is_not_trained_sharded() -> None:
    config = TrainConfig.model_validate({"parallel": {"shard": 2}})
    with pytest.raises(ConfigError) as raised:
        check_layout(config, 2, "64-true")
    assert str(raised.value) == (
        "trainer.precision (64-true) does not work with parallel.shard and parallel.expert; use one of "
        "32-true, bf16-mixed, bf16-true"
    )
