"""Whether two layers compute the same thing: output and gradient of x token by token, and how long the
gradient of the parameters is.

T tokens, D model width
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
"""How far a token's row may be off, as a part of its length; a wrong function is off by about 1."""

MAY_DIFFER = {torch.float32: 0.001, torch.bfloat16: 0.08, torch.float16: 0.02}
"""Share of the tokens whose k-th and next expert score so alike that rounding decides between them.
Here the router computes in float32; others compute it in the dtype of the layer."""


MAY_DIFFER_IN_GRADIENT = {torch.float32: 0.005, torch.bfloat16: 0.05, torch.float16: 0.02}
"""Of its length; a few tokens that go elsewhere change it too."""


class Outcome(NamedTuple):
    """What a layer made of the tokens."""

    hidden_TD: Tensor
    grad_x_TD: Tensor
    grad_norm: float
    """Length of the gradient of all parameters together, which does not depend on how they are laid out."""


def outcome(
    layer: Callable[[Tensor], Tensor], parameters: Iterable[Tensor], x: Tensor, grad: Tensor
) -> Outcome:
    """One forward and backward pass; all gradients are taken away again."""
    hidden = layer(x)
    hidden.backward(grad)
    assert x.grad is not None
    grad_x, x.grad = x.grad, None
    squares = 0.0
    for parameter in parameters:
        if parameter.grad is not None:
            squares += parameter.grad.double().square().sum().item()
            parameter.grad = None
    return Outcome(hidden.detach().flatten(0, -2), grad_x.flatten(0, -2), math.sqrt(squares))


def share_that_differs(theirs: Outcome, ours: Outcome) -> float:
    """The share of the tokens whose output or gradient is another; NaN differs from everything."""
    if theirs.hidden_TD.shape != ours.hidden_TD.shape:
        return 1.0
    same_T = same_rows(theirs.hidden_TD, ours.hidden_TD)
    same_T &= same_rows(theirs.grad_x_TD, ours.grad_x_TD)
    return 1 - same_T.float().mean().item()


def same_rows(their_TD: Tensor, our_TD: Tensor) -> Tensor:
    """Bool (T,): the rows that agree to `TOLERANCE`."""
    length_T = our_TD.float().norm(dim=-1)
    # A token whose experts nearly cancel is not held to a part of nearly nothing.
    length_T = length_T.clamp(min=0.1 * length_T.mean().item())
    off_T = (their_TD.float() - our_TD.float()).norm(dim=-1)
    return off_T <= TOLERANCE[our_TD.dtype] * length_T


def same_function(theirs: Outcome, ours: Outcome) -> bool:
    """Whether tokens and parameters fare alike; a missing gradient, or NaN, does not."""
    off = abs(theirs.grad_norm - ours.grad_norm) / ours.grad_norm
    return same_tokens(theirs, ours) and off <= MAY_DIFFER_IN_GRADIENT[ours.hidden_TD.dtype]


def same_tokens(theirs: Outcome, ours: Outcome) -> bool:
    """Whether all tokens agree but those whose choice of experts rounding decides."""
    return share_that_differs(theirs, ours) <= MAY_DIFFER[ours.hidden_TD.dtype]
