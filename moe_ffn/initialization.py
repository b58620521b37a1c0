"""How weight matrices start: the rule of `nn.Linear`, also for stacked experts."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn


@torch.no_grad()
def init_linear_(weight: Tensor, bias: Tensor | None = None) -> None:
    """Fill (..., out, in) weights, and their bias, from U(-1/sqrt(in), 1/sqrt(in)).

    That is what `nn.Linear` does for one matrix; `nn.init` would count the expert axis as fan-in.
    """
    bound = 1 / math.sqrt(weight.shape[-1])
    nn.init.uniform_(weight, -bound, bound)
    if bias is not None:
        nn.init.uniform_(bias, -bound, bound)
