"""Layers to time against each other: ours in every backend, the dense block, other libraries'.

All are given the same weights, the same tokens and the same output gradient.

B batch, S sequence, D model width, F hidden width
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmark.equivalence import (
    Outcome,
    outcome,
    same_function,
    same_tokens,
    share_that_differs,
)
from experiments.benchmark.peers import PEERS, Peer, UnsupportedError, Weights, hidden_of
from experiments.benchmark.shapes import DTYPES, Shape
from experiments.benchmark.timing import Timed
from moe_ffn import build_ffn
from moe_ffn.errors import first_line
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.routing.base import LinearRouter

DENSE = "dense FFN"
AUTO = "moe_ffn auto"

SAME, OTHER, REFERENCE = "same", "other function", "reference"
"""What a candidate computes, compared with our `loop` backend."""

Skip = Callable[[str, str], None]
"""(name, reason): says once that a candidate is left out."""


def ours(backend: str) -> str:
    return f"moe_ffn {backend}"


@dataclass(frozen=True)
class Layer:
    """A candidate, ready to run."""

    name: str
    module: nn.Module
    computes: str = SAME
    """`SAME`, `OTHER`, `REFERENCE`, or what differs."""

    @property
    def is_comparable(self) -> bool:
        """Whether its time may be set beside ours as a time for the same work."""
        return self.computes in (SAME, REFERENCE)

    def __call__(self, x: Tensor) -> Tensor:
        return hidden_of(self.module(x))

    def training_pass(self, tokens: Tokens) -> Timed:
        """Forward and backward, to x and to all parameters; the gradients are freed off the clock."""

        def run() -> None:
            self(tokens.x_BSD).backward(tokens.grad_BSD)

        def reset() -> None:
            tokens.x_BSD.grad = None
            self.module.zero_grad(set_to_none=True)

        return Timed(run, reset)

    def decoding_pass(self, x: Tensor, calls: int) -> Timed:
        """The forward pass alone, `calls` times."""

        def run() -> None:
            with torch.no_grad():
                for _ in range(calls):
                    self(x)

        return Timed(run, calls=calls)


class PlainSwiGLU(nn.Module):
    """The plain composition that a Mixture of Experts is measured against: down(silu(gate x) * up x)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


@dataclass(frozen=True)
class Tokens:
    """What every candidate of a case is given."""

    x_BSD: Tensor
    grad_BSD: Tensor
    """d(loss)/d(output), random: a constant one would let a backend off work."""

    @classmethod
    def of(cls, shape: Shape, device: torch.device) -> Tokens:
        generator = torch.Generator().manual_seed(1)
        x_BSD, grad_BSD = (
            torch.randn(shape.batch, generator=generator).to(device, dtype_of(shape))
            for _ in range(2)
        )
        return cls(x_BSD.requires_grad_(), grad_BSD)


def dtype_of(shape: Shape) -> torch.dtype:
    return getattr(torch, DTYPES[shape.dtype])


def moe_layer(shape: Shape, backend: str, device: torch.device) -> MoEFFN:
    """Ours: gated SwiGLU experts behind a top-k router, renormalised as in Mixtral."""
    config = {
        "type": "moe",
        "num_experts": shape.num_experts,
        "router": {"type": "top_k", "k": shape.k, "renormalize": shape.k > 1},
        "experts": {"type": "swiglu", "d_ff": shape.d_ff, "backend": backend},
    }
    with device:
        block = build_ffn(config, d_model=shape.d_model)
    assert isinstance(block, MoEFFN)
    return block.to(dtype_of(shape)) if device.type != "meta" else block


def with_weights_of(source: MoEFFN, shape: Shape, backend: str) -> MoEFFN:
    """The same layer in another backend, around the same memory and the very same router."""
    block = moe_layer(shape, backend, torch.device("meta"))
    block.load_state_dict(source.state_dict(), assign=True)
    block.router = source.router
    return block


def weights_of(block: MoEFFN) -> Weights:
    """What other libraries are given."""
    router, experts = block.router, block.experts
    assert isinstance(router, LinearRouter)
    with torch.no_grad():
        matrices = [getattr(experts, name).detach() for name in ("gate", "up", "down")]
    return Weights(router.projection.weight.detach(), *matrices)


def dense_layer(shape: Shape, device: torch.device) -> Layer:
    module = PlainSwiGLU(shape.d_model, shape.active_width).to(device, dtype_of(shape))
    return Layer(DENSE, module, REFERENCE)


@dataclass(frozen=True)
class Case:
    """One layer that candidates have to match: its weights, its tokens and what its `loop` makes of them."""

    shape: Shape
    source: MoEFFN
    tokens: Tokens
    expected: Outcome

    @classmethod
    def of(cls, shape: Shape, source: MoEFFN, device: torch.device) -> Case:
        tokens = Tokens.of(shape, device)
        return cls(shape, source, tokens, outcome_of(Layer(ours("loop"), source), tokens))


def our_layers(case: Case, backends: Sequence[str], skip: Skip) -> list[Layer]:
    """Ours in `auto` and each of the backends that take this shape."""
    layers: list[Layer] = []
    for backend in ("auto", *backends):
        block = with_weights_of(case.source, case.shape, backend)
        layer = checked(Layer(ours(backend), block), case.tokens, case.expected, skip, ValueError)
        if layer is not None:
            layers.append(layer)
    return layers


def peer_layers(case: Case, names: Sequence[str], skip: Skip) -> list[Layer]:
    """Those of other libraries that are installed and take this shape."""
    layers: list[Layer] = []
    for name in names:
        peer = PEERS[name]
        if not peer.is_installed or (peer.gpu_only and case.tokens.x_BSD.device.type != "cuda"):
            continue
        layer = _peer_layer(peer, case, skip)
        if layer is not None:
            layers.append(layer)
    return layers


def _peer_layer(peer: Peer, case: Case, skip: Skip) -> Layer | None:
    try:
        module = peer.build(weights_of(case.source), case.shape)
    except UnsupportedError as error:
        skip(peer.name, str(error))
        return None
    except Exception as error:  # of whatever kind: another library's trouble is a line, not an end
        skip(peer.name, f"{type(error).__name__}: {first_line(error)}")
        return None
    computes = SAME if peer.same_function else OTHER
    return checked(Layer(peer.name, module, computes), case.tokens, case.expected, skip, Exception)


def checked(
    layer: Layer, tokens: Tokens, expected: Outcome, skip: Skip, refusal: type[Exception]
) -> Layer | None:
    """The layer, with what it turned out to compute; None where it refuses to run."""
    try:
        found = outcome_of(layer, tokens)
    except refusal as error:
        skip(layer.name, first_line(error))
        return None
    if layer.computes != SAME or same_function(found, expected):
        return layer
    if same_tokens(found, expected):
        length = found.grad_norm / expected.grad_norm
        return replace(
            layer, computes=f"DIFFERS in gradients of weights: {length:.2f} times as long"
        )
    share = share_that_differs(found, expected)
    return replace(layer, computes=f"DIFFERS on {share:.0%} of the tokens")


def outcome_of(layer: Layer, tokens: Tokens) -> Outcome:
    return outcome(layer, layer.module.parameters(), tokens.x_BSD, tokens.grad_BSD)
