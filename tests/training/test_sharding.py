"""A rank builds its part of a model, and experts on several ranks give what one process gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import yaml
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ffn import FFNConfig, MoEConfig
from moe_ffn.config.errors import ConfigError
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.kernels.base import on_this_rank
from moe_ffn.model.decoder import DecoderConfig
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.validate import check_layout
from moe_ffn.training.parallel.dispatcher import AllToAllDispatcher
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


def test_experts_of_a_single_rank_are_not_sharded_further(tmp_path: Path) -> None:
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


REJECTED = """
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


@pytest.mark.parametrize(("options", "sentence"), answers(REJECTED))
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


# -- experts on several ranks: outputs, and every gradient


D_MODEL, BATCH, LENGTH = 8, 4, 6

Gradients = dict[str, Tensor]


def layer(options: dict[str, Any]) -> MoEFFN:
    torch.manual_seed(0)
    config = FFNConfig.model_validate({"type": "moe", "num_experts": 4, **options})
    assert isinstance(config, MoEConfig)
    block = config.build(D_MODEL)
    assert isinstance(block, MoEFFN)
    return block.double()


def tokens() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(BATCH, LENGTH, D_MODEL, generator=generator, dtype=torch.float64)


def split_(block: MoEFFN, rank: int, num_ranks: int) -> None:
    """Leave this rank its share of the experts."""
    share = block.num_experts // num_ranks
    for name, parameter in list(block.experts.innermost.named_parameters()):
        part = parameter.detach()[rank * share : (rank + 1) * share].clone()
        setattr(block.experts.innermost, name, nn.Parameter(part))
    assert dist.group.WORLD is not None
    block.dispatcher = AllToAllDispatcher(block.num_experts, dist.group.WORLD)


def step(rank: int, num_ranks: int, options: dict[str, Any], steer: float) -> Any:
    """A batch's share through the layer and back: outputs, gradient of the input, of every parameter."""
    block = layer(options)
    if steer:
        steer_(block, steer)
    if num_ranks > 1:
        split_(block, rank, num_ranks)
    x = tokens().chunk(num_ranks)[rank].requires_grad_()
    output = block(x)
    (output.hidden**2).sum().backward()
    assert x.grad is not None
    gradients = {
        name: torch.zeros_like(p) if p.grad is None else p.grad
        for name, p in block.named_parameters()
    }
    missing = [name for name, p in block.named_parameters() if p.grad is None]
    return output.hidden.detach(), x.grad, gradients, missing


def steer_(block: MoEFFN, strength: float) -> None:
    """Send every token to the first experts."""
    bias = dict(block.router.named_parameters())["projection.bias"]
    bias.data += strength * torch.tensor([3.0, 2.0, 0.0, 0.0], dtype=bias.dtype)


def whole(name: str, of_ranks: list[Gradients]) -> Tensor:
    """The gradient of one process: experts side by side, of the rest the sum."""
    if name.startswith("experts."):
        return torch.cat([gradients[name] for gradients in of_ranks])
    return torch.stack([gradients[name] for gradients in of_ranks]).sum(0)


LAYERS: dict[str, dict[str, Any]] = {
    "dropless": {"router": {"type": "top_k", "k": 2, "bias": True}},
    "shared": {"router": {"type": "top_k", "k": 2, "bias": True}, "shared_expert": "swiglu"},
    "sigmoid": {"router": {"type": "sigmoid_top_k", "k": 2, "bias": True}},
    "relu": {"router": {"type": "relu", "k": 2, "bias": True}},
    "mlp": {
        "router": {"type": "top_k", "k": 3, "bias": True},
        "experts": {"type": "mlp", "bias": True},
    },
}


STEERED = "dropless, steered"
"""A layer whose experts 2 and 3 have no token."""


def steps(rank: int, num_ranks: int) -> dict[str, Any]:
    """A step of each layer."""
    found = {name: step(rank, num_ranks, options, 0.0) for name, options in LAYERS.items()}
    return found | {STEERED: step(rank, num_ranks, LAYERS["dropless"], 50.0)}


@pytest.mark.parametrize("num_ranks", [2, 4])
def test_every_gradient_equals_that_of_one_process(num_ranks: int, tmp_path: Path) -> None:
    alone = steps(0, 1)
    assert not alone[STEERED][2]["experts.down"][2:].any()

    together = on_ranks(num_ranks, tmp_path, steps, num_ranks)

    for name, (hidden, into, gradients, _) in alone.items():
        of_ranks = [found[name] for found in together]
        torch.testing.assert_close(torch.cat([found[0] for found in of_ranks]), hidden)
        torch.testing.assert_close(torch.cat([found[1] for found in of_ranks]), into)
        for parameter, wanted in gradients.items():
            got = whole(parameter, [found[2] for found in of_ranks])
            where = f"{name}, {parameter}"
            torch.testing.assert_close(got, wanted, msg=lambda text, w=where: f"{w}: {text}")
        missing = [found[3] for found in of_ranks]
        assert missing == [[]] * num_ranks, f"{name}: every parameter is in the graph"


class Order(TorchDispatchMode):
    """Sends, waits and products, in order, each by the last axis of what it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[str, int]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).split(".")[1]
        if name in ("all_to_all_single", "wait_tensor", "mm"):
            self.events.append((name, result.shape[-1] if isinstance(result, Tensor) else 0))
        return result


def events_on_a_rank(rank: int, options: dict[str, Any]) -> list[tuple[str, int]]:
    block = layer(options)
    split_(block, rank, 2)
    x = tokens().chunk(2)[rank]
    with Order() as order, torch.no_grad():
        block(x)
    return order.events


def test_the_shared_expert_computes_while_tokens_travel(tmp_path: Path) -> None:
    d_ff = 3 * D_MODEL
    options = {**LAYERS["shared"], "shared_expert": {"type": "swiglu", "d_ff": d_ff}}
    for events in on_ranks(2, tmp_path, events_on_a_rank, options):
        sent = events.index(("all_to_all_single", D_MODEL))
        waited = events.index(("wait_tensor", D_MODEL))
        between = [width for name, width in events[sent:waited] if name == "mm"]
        assert between == [d_ff, d_ff, D_MODEL]  # gate, up and down
        # A device that keeps the order of collectives would wait for the tokens behind which one is sent.
        before = events[:sent]
        assert ("all_to_all_single", 1) in before
        assert ("all_to_all_single", 2) in before


def linear_experts() -> MoEFFN:
    """y = w 254 x + (1 - w) 2 x: expert 0 has weight w = 257 / 512, which bfloat16 rounds to 1 / 2."""
    experts = {"type": "mlp", "activation": "identity", "d_ff": D_MODEL}
    router = {"type": "top_k", "k": 2, "bias": True}
    block = layer({"num_experts": 2, "router": router, "experts": experts}).float()
    weights = dict(block.named_parameters())
    with torch.no_grad():
        weights["experts.up"].copy_(torch.eye(D_MODEL))
        weights["experts.down"].copy_(
            torch.eye(D_MODEL) * torch.tensor([254.0, 2.0])[:, None, None]
        )
        weights["router.projection.weight"].zero_()
        weights["router.projection.bias"].copy_(torch.tensor([257 / 255, 1.0]).log())
    return block


def mixed_on_a_rank(rank: int) -> tuple[list[Tensor], list[Tensor]]:
    """The layer's outputs and gradients of ones, in bf16-mixed and in bf16-true."""
    found: tuple[list[Tensor], list[Tensor]] = [], []
    latent = layer(
        {"router": {"type": "top_k", "k": 2}, "experts": {"type": "latent", "width": 4}}
    ).bfloat16()
    split_(latent, rank, 2)
    latent(torch.ones(BATCH, D_MODEL, dtype=torch.bfloat16))  # whose product follows in bfloat16
    for dtype in (torch.float32, torch.bfloat16):
        block = linear_experts().to(dtype)
        split_(block, rank, 2)
        x = torch.ones(BATCH, D_MODEL, dtype=dtype, requires_grad=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
            hidden = block(x).hidden
        hidden.sum().backward()
        assert x.grad is not None
        found[0].append(hidden.detach())
        found[1].append(x.grad)
    return found


def test_outputs_of_ranks_are_summed_in_float32(tmp_path: Path) -> None:
    """The parts 127.5 and 255 / 256 are exact in bfloat16, but their sum would round to 128 or 129."""
    for found in on_ranks(2, tmp_path, mixed_on_a_rank):
        for mixed, true in found:
            assert (mixed.dtype, true.dtype) == (torch.float32, torch.bfloat16)
            assert mixed.unique().tolist() == [127.5 + 255 / 256]
            assert true.unique().tolist() == [128.0]
