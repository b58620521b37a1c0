"""Experts on several ranks give what one process gives: outputs, and every gradient."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from moe_ffn import FFNConfig, MoEConfig
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.training.parallel.dispatcher import AllToAllDispatcher
from tests.helpers.ranks import on_ranks

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
