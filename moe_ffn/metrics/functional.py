"""What is measured of one layer's Routing: pure functions.

E experts, N (token, expert) pairs
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ffn.outputs import Routing


def max_violation(load_E: Tensor) -> Tensor:
    """MaxVio = (max - mean) / mean of the load: 0 at balance, E - 1 when one expert has everything.

    Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy" (arXiv:2408.15664), section 4.1.
    """
    mean = load_E.mean()
    tiny = torch.finfo(load_E.dtype).tiny
    return (load_E.max() - mean) / mean.clamp(min=tiny)


def dropped_fraction(routing: Routing) -> Tensor:
    """The share of the real tokens' pairs that found their expert full."""
    real_N = routing.real_N
    return (routing.dropped_N & real_N).sum() / real_N.sum().clamp(min=1)


def nonfinite_tokens(routing: Routing) -> Tensor:
    """How many real tokens have a logit that is NaN or infinite: something before this layer broke."""
    broken_T = ~routing.logits_TE.isfinite().all(dim=-1)
    return (broken_T if routing.mask_T is None else broken_T & routing.mask_T).sum()


def capacity_used(routing: Routing) -> Tensor:
    """The share of the experts' places that are taken; nan when dropless."""
    computed = routing.computed_N.sum()
    if routing.capacity is None:
        return torch.full_like(computed, torch.nan, dtype=torch.get_default_dtype())
    return computed / (routing.capacity * routing.num_experts).clamp(min=1)
