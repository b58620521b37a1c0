"""Whether two layers compute the same thing: output and gradient of x, token by token.

T tokens, D model width
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.05, torch.float16: 0.01}
"""How far a token's row may be off, as a part of its length; a wrong function is off by about 1."""

MAY_DIFFER = {torch.float32: 0.001, torch.bfloat16: 0.08, torch.float16: 0.02}
"""Share of the tokens whose k-th and next expert score so alike that rounding decides between them.
Here the router computes in float32; others compute it in the dtype of the layer."""


class Outcome(NamedTuple):
    """What a layer made of the tokens."""

    hidden_TD: Tensor
    grad_x_TD: Tensor


def outcome(layer: Callable[[Tensor], Tensor], x: Tensor, grad: Tensor) -> Outcome:
    """One forward and backward pass; the gradient of `x` is taken away again."""
    hidden = layer(x)
    hidden.backward(grad)
    assert x.grad is not None
    grad_x, x.grad = x.grad, None
    return Outcome(hidden.detach().flatten(0, -2), grad_x.flatten(0, -2))


def share_that_differs(theirs: Outcome, ours: Outcome) -> float:
    """The share of the tokens whose output or gradient is another; NaN differs from everything."""
    same_T = torch.ones(len(ours.hidden_TD), dtype=torch.bool, device=ours.hidden_TD.device)
    for their_TD, our_TD in zip(theirs, ours, strict=True):
        if their_TD.shape != our_TD.shape:
            return 1.0
        length_T = our_TD.float().norm(dim=-1)
        # A token whose experts nearly cancel is not held to a part of nearly nothing.
        length_T = length_T.clamp(min=0.1 * length_T.mean().item())
        off_T = (their_TD.float() - our_TD.float()).norm(dim=-1)
        same_T &= off_T <= TOLERANCE[our_TD.dtype] * length_T
    return 1 - same_T.float().mean().item()


def same_function(theirs: Outcome, ours: Outcome) -> bool:
    """Whether all tokens agree but those whose choice of experts rounding decides."""
    return share_that_differs(theirs, ours) <= MAY_DIFFER[ours.hidden_TD.dtype]
