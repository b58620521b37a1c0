"""Whether `torch.func` is at work: its transforms see torch's own operators, and no backward pass of ours."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad


def transforms_at_work() -> bool:
    """Whether `grad`, `jvp` or `vmap` of `torch.func`, or forward-mode differentiation, is under way."""
    if torch.compiler.is_compiling():  # which traces through them by itself
        return False
    # Private, and what `torch.autograd.Function.apply` itself asks; there is no public way.
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_batched(tensor: Tensor) -> bool:
    """Whether `vmap`, or `is_grads_batched` of a backward pass, gave the tensor an axis that is not shown."""
    functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009  # typed nowhere
    if functorch.is_legacy_batchedtensor(tensor):
        return True
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False
