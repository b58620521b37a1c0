"""A rank builds its part of a model: the numbers of one process, in memory for one layer more at most."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import yaml
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from moe_ffn.config.errors import ConfigError
from moe_ffn.kernels.base import on_this_rank
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.validate import check_layout
from moe_ffn.training.parallel.layout import Layout, ParallelConfig
from moe_ffn.training.parallel.sharding import Sharder, full_tensor, shard_like
from tests.helpers.cases import answers
from tests.helpers.memory import peak_above
from tests.helpers.ranks import on_ranks

LAYOUTS = [Layout(shard=4), Layout(shard=2, expert=2), Layout(data=2, expert=2)]


def model(d_model: int, num_layers: int, num_experts: int = 8) -> DecoderConfig:
    router = {"type": "top_k", "k": 2}
    return DecoderConfig.model_validate(
        {
            "d_model": d_model,
            "num_layers": num_layers,
            "attention": {"num_heads": 4},
            "ffn": {
                "type": "moe",
                "num_experts": num_experts,
                "router": router,
                "shared_expert": "swiglu",
            },
        }
    )


def build_sharded(config: DecoderConfig, layout: Layout) -> torch.nn.Module:
    torch.manual_seed(3)
    sharder = Sharder(layout, "cpu")

    def shard(layer: torch.nn.Module) -> None:
        layer.get_parameter("ffn.experts.down").requires_grad_(False)
        sharder.shard_layer(layer)

    decoder = config.build(vocab_size=257, max_seq_len=64, on_layer=shard)
    sharder.shard_rest(decoder)
    return decoder


def all_built_on_a_rank(rank: int) -> list[tuple[Layout, dict[str, Tensor], float]]:
    return [(layout, *built_on_a_rank(layout)) for layout in LAYOUTS]


def built_on_a_rank(layout: Layout) -> tuple[dict[str, Tensor], float]:
    """The weights, whole; and the peak of building a large model, in bytes, of one layout."""
    decoder = build_sharded(model(16, 2), layout)
    experts = decoder.get_submodule("layers.0.ffn.experts")
    assert isinstance(experts, FSDPModule) == (layout.expert > 1)
    frozen = [name for name, p in decoder.named_parameters() if not p.requires_grad]
    assert frozen == [f"layers.{layer}.ffn.experts.down" for layer in (0, 1)]
    weights = {name: full_tensor(p.detach()) for name, p in decoder.named_parameters()}
    # A moment is cut as its weight is, a count of steps is not.
    for name, parameter in decoder.named_parameters():
        part = shard_like(weights[name], parameter)
        assert torch.equal(on_this_rank(part), on_this_rank(parameter)), name
        assert not isinstance(shard_like(torch.tensor(3.0), parameter), DTensor)
    # Fewer experts than ranks are cut themselves.
    num_parts = layout.shard * layout.expert
    for name, parameter in build_sharded(model(16, 1, num_experts=2), layout).named_parameters():
        if "experts" in name and layout.expert > 1:
            assert on_this_rank(parameter).numel() * num_parts == parameter.numel(), name
    peak = peak_above(lambda: build_sharded(model(256, 8), layout)) if layout == LAYOUTS[1] else 0
    return weights, peak


def experts_are_sharded(rank: int, layout: Layout) -> bool:
    decoder = build_sharded(model(16, 1), layout)
    return isinstance(decoder.get_submodule("layers.0.ffn.experts"), FSDPModule)


def test_experts_of_one_rank_alone_are_not_sharded_further(tmp_path: Path) -> None:
    assert on_ranks(2, tmp_path, experts_are_sharded, Layout(expert=2)) == [False] * 2


def test_a_rank_builds_its_part_of_the_model_of_one_process(tmp_path: Path) -> None:
    of_ranks = on_ranks(4, tmp_path, all_built_on_a_rank)

    torch.manual_seed(3)
    expected = dict(model(16, 2).build(257, 64).named_parameters())
    total = 4 * model(256, 8).num_params(257, 64)
    for layout, weights, peak in (found for of_layouts in of_ranks for found in of_layouts):
        assert weights.keys() == expected.keys(), layout
        for name, value in weights.items():
            assert torch.equal(value, expected[name]), (layout, name)
        part, layer = total / (layout.shard * layout.expert), total / 8
        if layout == LAYOUTS[1]:
            assert 0.8 * part < peak < part + 1.5 * layer, f"{peak / total:.2f} of the model"


# -- the mesh that a run asks for


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


def test_an_expert_is_split_only_if_ranks_outnumber_the_experts() -> None:
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
