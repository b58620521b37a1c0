"""Layers to time, and the check that they compute the same function.

Our layer in every backend and the layers of other libraries have the same weights. All layers, and the dense
block, get the same tokens and the same output gradient.

T tokens, D model width, B batch, S sequence
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmark.peers import PEERS, REFERENCE, SAME, Weights, hidden_of
from experiments.benchmark.shapes import DTYPES, Shape
from moe_ffn import build_ffn
from moe_ffn.config.errors import first_line
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.routing.base import LinearRouter

DENSE = "dense FFN"
AUTO = "moe_ffn auto"


@dataclass(frozen=True)
class Layer:
    """A feed-forward layer to time."""

    name: str
    module: nn.Module
    computes: str = SAME
    """`SAME`, `REFERENCE`, or a description of the difference."""

    def __call__(self, x: Tensor) -> Tensor:
        return hidden_of(self.module(x))


class Tokens(NamedTuple):
    """Input and output gradient of all layers in a case."""

    x_BSD: Tensor
    grad_BSD: Tensor
    """Random d(loss)/d(output); a constant would save work in some backends."""

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
    """Our layer with its weights and tokens, and the result of `loop`, which every layer must match."""

    shape: Shape
    source: MoEFFN
    tokens: Tokens
    expected: Derivatives

    @classmethod
    def of(cls, shape: Shape, device: torch.device, **router: Any) -> Case:
        """Draw weights and tokens from fixed seeds; `router` has options of a router other than top-k."""
        torch.manual_seed(0)
        source, tokens = moe_layer(shape, "loop", device, **router), Tokens.of(shape, device)
        return cls(shape, source, tokens, outcome(source, tokens))


# ---------------------------------------------------------------------------------- candidates


class PlainSwiGLU(nn.Module):
    """down(silu(gate x) * up x)."""

    def __init__(self, d_model: int, d_ff: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, d_ff, bias=False)
        self.up = nn.Linear(d_model, d_ff, bias=False)
        self.down = nn.Linear(d_ff, d_model, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


def dense_layer(shape: Shape, device: torch.device) -> Layer:
    """Build the block that a Mixture of Experts is compared with."""
    module = PlainSwiGLU(shape.d_model, shape.active_width).to(device, dtype_of(shape))
    return Layer(DENSE, module, REFERENCE)


def dtype_of(shape: Shape) -> torch.dtype:
    return getattr(torch, DTYPES[shape.dtype])


def moe_layer(shape: Shape, backend: str, device: torch.device, **router: Any) -> MoEFFN:
    """Build SwiGLU experts with a renormalised top-k router, as in Mixtral, or with another router."""
    config = {
        "type": "moe",
        "num_experts": shape.num_experts,
        "router": router or {"type": "top_k", "k": shape.k, "renormalize": shape.k > 1},
        "experts": {"type": "swiglu", "d_ff": shape.d_ff, "backend": backend},
    }
    with device:
        block = build_ffn(config, d_model=shape.d_model)
    assert isinstance(block, MoEFFN)
    return block.to(dtype_of(shape)) if device.type != "meta" else block


def sparse_layers(
    case: Case, backends: Sequence[str], peers: Sequence[str], note: Callable[[str], None]
) -> list[Layer]:
    """Return our layer in `auto` and each of `backends`, and the installed `peers` that support this shape.

    Our layers share the weights of the case. `note` gets a remark about a layer that is skipped, or computes
    something else (`Layer.computes`).
    """
    on_gpu = case.tokens.x_BSD.device.type == "cuda"
    builders: dict[str, Callable[[], nn.Module]]
    builders = {f"moe_ffn {name}": partial(_ours, case, name) for name in ("auto", *backends)}
    for name in peers:
        if PEERS[name].is_installed and (on_gpu or not PEERS[name].gpu_only):
            builders[name] = partial(PEERS[name].build, peer_weights(case.source), case.shape)
    layers: list[Layer] = []
    for name, build in builders.items():
        try:
            module = build()
            result = outcome(module, case.tokens)
        except Exception as error:  # a peer may fail in any way
            is_unsupported = isinstance(error, ValueError)
            if not is_unsupported and name not in PEERS:
                raise
            kind = "" if is_unsupported else f"{type(error).__name__}: "
            note(f"skipped: {name}: {kind}{first_line(error)}")
            continue
        if (computes := compare(result, case.expected)) != SAME:
            note(f"{name} {computes} at {case.shape}")
        layers.append(Layer(name, module, computes))
    return layers


def _ours(case: Case, backend: str) -> MoEFFN:
    block = moe_layer(case.shape, backend, torch.device("meta"))
    block.load_state_dict(case.source.state_dict(), assign=True)
    block.router = case.source.router
    return block


def peer_weights(block: MoEFFN) -> Weights:
    """Return the weights of our block, to load into other libraries."""
    router, experts = block.router, block.experts
    assert isinstance(router, LinearRouter)
    with torch.no_grad():
        matrices = [getattr(experts, name).detach() for name in ("gate", "up", "down")]
    return Weights(router.projection.weight.detach(), *matrices)


# --------------------------------------------------------------------------------- equivalence


class Tolerance(NamedTuple):
    """Maximum differences that rounding explains between layers that compute the same function."""

    row: float
    """Difference in a token's row, relative to its norm; another function is off by about 1."""
    tokens: float
    """Share of tokens for which rounding decides between the k-th and the next expert.

    Our router computes in float32; other routers use the dtype of the layer.
    """
    gradient: float
    """Relative difference in the norm of the parameters' gradient."""


TOLERANCES = {
    torch.float32: Tolerance(1e-3, 0.001, 0.005),
    torch.bfloat16: Tolerance(0.05, 0.08, 0.05),
    torch.float16: Tolerance(0.01, 0.02, 0.02),
}


class Derivatives(NamedTuple):
    """Result of one forward and backward pass."""

    hidden_TD: Tensor
    grad_x_TD: Tensor
    grad_norm: float
    """Norm of the gradient of all parameters, which does not depend on their layout."""


def outcome(module: nn.Module, tokens: Tokens) -> Derivatives:
    """Run one forward and backward pass, and remove all gradients."""
    x = tokens.x_BSD
    hidden = hidden_of(module(x))
    hidden.backward(tokens.grad_BSD)
    assert x.grad is not None
    grad_x, x.grad = x.grad, None
    grads = [p.grad.double() for p in module.parameters() if p.grad is not None]
    squares = sum(grad.square().sum().item() for grad in grads)
    module.zero_grad()
    return Derivatives(hidden.detach().flatten(0, -2), grad_x.flatten(0, -2), math.sqrt(squares))


def compare(theirs: Derivatives, ours: Derivatives) -> str:
    """Return `SAME`, or a description of a difference beyond rounding; NaN differs from everything."""
    tolerance = TOLERANCES[ours.hidden_TD.dtype]
    share = 1.0
    if theirs.hidden_TD.shape == ours.hidden_TD.shape:
        same_T = same_rows(theirs.hidden_TD, ours.hidden_TD)
        same_T &= same_rows(theirs.grad_x_TD, ours.grad_x_TD)
        share = 1 - same_T.float().mean().item()
    if share > tolerance.tokens:
        return f"DIFFERS on {share:.0%} of the tokens"
    ratio = theirs.grad_norm / ours.grad_norm
    if not abs(ratio - 1) <= tolerance.gradient:
        return f"DIFFERS in gradients of weights: their norm is {ratio:.2f} times ours"
    return SAME


def same_rows(their_TD: Tensor, our_TD: Tensor) -> Tensor:
    """Return a mask, (T,), of the rows that agree within the tolerance."""
    norm_T = our_TD.float().norm(dim=-1)
    # If the experts of a token nearly cancel, rounding is large relative to its row.
    norm_T = norm_T.clamp(min=0.1 * norm_T.mean().item())
    difference_T = (their_TD.float() - our_TD.float()).norm(dim=-1)
    return difference_T <= TOLERANCES[our_TD.dtype].row * norm_T


def in_evaluation(layer: Layer, case: Case) -> Layer:
    """Put a layer into evaluation mode, and check its output: without gradients it runs other code."""
    layer.module.eval()
    x_BSD = case.tokens.x_BSD.detach()
    with torch.no_grad():
        expected_TD = case.source.eval()(x_BSD).hidden.flatten(0, -2)
        hidden_TD = layer(x_BSD).flatten(0, -2)
    share = 1 - same_rows(hidden_TD, expected_TD).float().mean().item()
    if layer.computes == SAME and share > TOLERANCES[expected_TD.dtype].tokens:
        return replace(layer, computes=f"DIFFERS on {share:.0%} of the tokens without gradients")
    return layer
