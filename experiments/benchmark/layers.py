"""Layers to time against each other, and whether they compute the same function.

All are given the same weights, the same tokens and the same output gradient. Ours are compared in every
backend with the dense block and with other libraries' layers.

T tokens, D model width, B batch, S sequence
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmark.peers import PEERS, UnsupportedError, Weights, hidden_of
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


@dataclass(frozen=True)
class Tokens:
    """The input and the output gradient that every candidate of a case is given."""

    x_BSD: Tensor
    grad_BSD: Tensor
    """d(loss)/d(output), random: a constant one would spare some backends work."""

    @classmethod
    def of(cls, shape: Shape, device: torch.device) -> Tokens:
        generator = torch.Generator().manual_seed(1)
        x_BSD, grad_BSD = (
            torch.randn(shape.batch, generator=generator).to(device, dtype_of(shape))
            for _ in range(2)
        )
        return cls(x_BSD.requires_grad_(), grad_BSD)


@dataclass(frozen=True)
class Case:
    """One layer that candidates have to match: its weights, its tokens, and the outcome of its `loop`."""

    shape: Shape
    source: MoEFFN
    tokens: Tokens
    expected: Outcome

    @classmethod
    def of(cls, shape: Shape, source: MoEFFN, device: torch.device) -> Case:
        tokens = Tokens.of(shape, device)
        return cls(shape, source, tokens, outcome(Layer(ours("loop"), source), tokens))


# ---------------------------------------------------------------------------------- candidates


class PlainSwiGLU(nn.Module):
    """The plain composition that a Mixture of Experts is measured against: down(silu(gate x) * up x)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def dense_layer(shape: Shape, device: torch.device) -> Layer:
    module = PlainSwiGLU(shape.d_model, shape.active_width).to(device, dtype_of(shape))
    return Layer(DENSE, module, REFERENCE)


def dtype_of(shape: Shape) -> torch.dtype:
    return getattr(torch, DTYPES[shape.dtype])


def ours(backend: str) -> str:
    return f"moe_ffn {backend}"


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


def our_layers(case: Case, backends: Sequence[str], skip: Skip) -> list[Layer]:
    """Ours in `auto` and each of the backends that take this shape, around the same memory."""
    layers: list[Layer | None] = []
    for backend in ("auto", *backends):
        block = moe_layer(case.shape, backend, torch.device("meta"))
        block.load_state_dict(case.source.state_dict(), assign=True)
        block.router = case.source.router
        layers.append(checked(Layer(ours(backend), block), case, skip, ValueError))
    return [layer for layer in layers if layer is not None]


def peer_layers(case: Case, names: Sequence[str], skip: Skip) -> list[Layer]:
    """Those of other libraries that are installed and take this shape."""
    layers: list[Layer | None] = []
    for peer in map(PEERS.__getitem__, names):
        on_cpu = case.tokens.x_BSD.device.type != "cuda"
        if not peer.is_installed or (peer.gpu_only and on_cpu):
            continue
        try:
            module = peer.build(weights_of(case.source), case.shape)
        except UnsupportedError as error:
            skip(peer.name, str(error))
        except Exception as error:  # of any kind: a peer that breaks does not end the run
            skip(peer.name, f"{type(error).__name__}: {first_line(error)}")
        else:
            layer = Layer(peer.name, module, SAME if peer.same_function else OTHER)
            layers.append(checked(layer, case, skip, Exception))
    return [layer for layer in layers if layer is not None]


def weights_of(block: MoEFFN) -> Weights:
    """Our weights, as other libraries are given them."""
    router, experts = block.router, block.experts
    assert isinstance(router, LinearRouter)
    with torch.no_grad():
        matrices = [getattr(experts, name).detach() for name in ("gate", "up", "down")]
    return Weights(router.projection.weight.detach(), *matrices)


# --------------------------------------------------------------------------------- equivalence


class Tolerance(NamedTuple):
    """How far a layer of the same function may be off by rounding."""

    row: float
    """Distance of a token's row, as a part of its length; a wrong function is off by about 1."""
    tokens: float
    """Share of the tokens whose k-th and next expert score so alike that rounding decides between them.
    Our router computes in float32; others compute it in the dtype of the layer."""
    gradient: float
    """Difference in length of the parameters' gradient; a few tokens that go elsewhere change it too."""


TOLERANCES = {
    torch.float32: Tolerance(1e-3, 0.001, 0.005),
    torch.bfloat16: Tolerance(0.05, 0.08, 0.05),
    torch.float16: Tolerance(0.01, 0.02, 0.02),
}


class Outcome(NamedTuple):
    """The result of one forward and backward pass."""

    hidden_TD: Tensor
    grad_x_TD: Tensor
    grad_norm: float
    """Length of the gradient of all parameters together, which does not depend on how they are laid out."""


def outcome(layer: Layer, tokens: Tokens) -> Outcome:
    """One forward and backward pass; all gradients are taken away again."""
    x = tokens.x_BSD
    hidden = layer(x)
    hidden.backward(tokens.grad_BSD)
    assert x.grad is not None
    grad_x, x.grad = x.grad, None
    squares = 0.0
    for parameter in layer.module.parameters():
        if parameter.grad is not None:
            squares += parameter.grad.double().square().sum().item()
            parameter.grad = None
    return Outcome(hidden.detach().flatten(0, -2), grad_x.flatten(0, -2), math.sqrt(squares))


def checked(layer: Layer, case: Case, skip: Skip, refusal: type[Exception]) -> Layer | None:
    """The layer, marked with what it computes; None where it refuses to run."""
    try:
        found = outcome(layer, case.tokens)
    except refusal as error:
        skip(layer.name, first_line(error))
        return None
    if layer.computes != SAME or same_function(found, case.expected):
        return layer
    differs = share_that_differs(found, case.expected)
    if differs <= TOLERANCES[case.expected.hidden_TD.dtype].tokens:
        length = found.grad_norm / case.expected.grad_norm
        computes = f"DIFFERS in gradients of weights: {length:.2f} times as long"
    else:
        computes = f"DIFFERS on {differs:.0%} of the tokens"
    return replace(layer, computes=computes)


def same_function(theirs: Outcome, ours: Outcome) -> bool:
    """Whether tokens and gradients of parameters agree; a missing gradient, or NaN, does not."""
    tolerance = TOLERANCES[ours.hidden_TD.dtype]
    off = abs(theirs.grad_norm - ours.grad_norm) / ours.grad_norm
    return share_that_differs(theirs, ours) <= tolerance.tokens and off <= tolerance.gradient


def share_that_differs(theirs: Outcome, ours: Outcome) -> float:
    """The share of the tokens whose output or gradient is another; NaN differs from everything."""
    if theirs.hidden_TD.shape != ours.hidden_TD.shape:
        return 1.0
    same_T = same_rows(theirs.hidden_TD, ours.hidden_TD)
    same_T &= same_rows(theirs.grad_x_TD, ours.grad_x_TD)
    return 1 - same_T.float().mean().item()


def same_rows(their_TD: Tensor, our_TD: Tensor) -> Tensor:
    """Bool (T,): the rows that agree within the tolerance."""
    length_T = our_TD.float().norm(dim=-1)
    # A token whose experts nearly cancel is not held to a part of nearly nothing.
    length_T = length_T.clamp(min=0.1 * length_T.mean().item())
    off_T = (their_TD.float() - our_TD.float()).norm(dim=-1)
    return off_T <= TOLERANCES[our_TD.dtype].row * length_T
