"""A division and a logarithm that stay finite at 0, and their gradients too."""

from __future__ import annotations

import torch
from torch import Tensor


def divisor(sums: Tensor) -> Tensor:
    """Sums of what is not negative, to divide by, none of them 0."""
    # Larger than the least number there is, so that no gradient divided by it overflows.
    limits = torch.finfo(sums.dtype)
    return sums.clamp(min=limits.tiny / limits.eps)


def finite_log(values: Tensor) -> Tensor:
    """The logarithm of what is not negative, and of 0 that of the least number there is."""
    return values.clamp(min=torch.finfo(values.dtype).tiny).log()
