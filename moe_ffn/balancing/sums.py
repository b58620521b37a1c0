"""Sums and means over the pairs and tokens of a routing, for losses and metrics.

T tokens, E experts, N (token, expert) pairs, B sequences
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, TypeVar, cast

import torch
from einops import rearrange
from torch import Tensor

from moe_ffn.outputs import FFNOutput, Routing

F = TypeVar("F", bound=Callable[..., Any])

Routers = Sequence[tuple[str, Any, int]]
"""(name of a layer, config of its router, number of experts)."""


def takes_routing(function: F) -> F:
    """Decorate a function of a Routing so that `check_routing` checks its first argument."""

    @wraps(function)
    def checked(routing: Routing, *args: Any, **kwargs: Any) -> Any:
        check_routing(routing, function.__name__)
        return function(routing, *args, **kwargs)

    return cast("F", checked)


def check_routing(value: object, function_name: str) -> None:
    """Raise TypeError if `value` is not a Routing; most often it is None, from a dense block."""
    if isinstance(value, Routing):
        return
    got = f"a value of type {type(value).__name__}"
    if value is None:
        got = "None, the routing of a block without a router; leave such layers out"
    elif isinstance(value, FFNOutput):
        got = "an FFNOutput; use output.routing"
    raise TypeError(f"{function_name} takes a Routing, but got {got}")


def count_pairs(expert_ids_N: Tensor, num_experts: int) -> Tensor:
    """Return the number of pairs of each expert, int64 (E,), without a host sync, unlike `bincount`."""
    ones_N = torch.ones_like(expert_ids_N)
    return expert_ids_N.new_zeros(num_experts).scatter_add_(0, expert_ids_N, ones_N)


def divisor(sums: Tensor) -> Tensor:
    """Return non-negative sums as divisors, clamped above 0."""
    # The bound is above the smallest number, so that gradients divided by it do not overflow.
    limits = torch.finfo(sums.dtype)
    return sums.clamp(min=limits.tiny / limits.eps)


def finite_log(values: Tensor) -> Tensor:
    """Return the logarithm of non-negative values, with 0 clamped to the smallest normal number."""
    return values.clamp(min=torch.finfo(values.dtype).tiny).log()


def cv_squared(values_E: Tensor) -> Tensor:
    """Return the squared coefficient of variation, sample variance / mean^2; 0 for a single value.

    Tutel and fastmoe also use the sample variance.
    """
    tiny = torch.finfo(values_E.dtype).tiny
    variance = values_E.var(correction=min(len(values_E) - 1, 1))
    return variance / values_E.mean().square().clamp(min=tiny)


@takes_routing
def pairs_per_expert(routing: Routing) -> Tensor:
    """Return the number of real pairs of each expert, int64 (E,), before dropping."""
    expert_ids_N = routing.expert_ids_N.masked_fill(~routing.active_N, routing.num_experts)
    return count_pairs(expert_ids_N, routing.num_experts + 1)[:-1]


@takes_routing
def pairs_per_sequence(routing: Routing) -> Tensor:
    """Return `pairs_per_expert` of each sequence, int64 (B, E)."""
    num_experts = routing.num_experts
    length = max(routing.sequence_length, 1)
    num_cells = routing.num_tokens // length * num_experts
    cell_N = routing.token_indices_N // length * num_experts + routing.expert_ids_N
    pairs = count_pairs(cell_N.masked_fill(~routing.active_N, num_cells), num_cells + 1)[:-1]
    return rearrange(pairs, "(b e) -> b e", e=num_experts)


def normalized_scores(routing: Routing, needed_by: str = "normalized_scores") -> Tensor:
    """Return each token's scores divided by their sum, (T, E); see `Routing.require`."""
    scores_TE = routing.require("scores_TE", needed_by)
    return scores_TE / divisor(scores_TE.sum(dim=-1, keepdim=True))


def token_entropy(scores_TE: Tensor) -> Tensor:
    """Return the entropy of each token's normalised scores, (T,), in nats."""
    # Not `special.entr`: its gradient is infinite at score 0, which ReLU returns, and then becomes NaN.
    return -(scores_TE * finite_log(scores_TE)).sum(dim=-1)


def mean_over_tokens(values: Tensor, routing: Routing) -> Tensor:
    """Return the mean of (T, ...) values over the real tokens; 0 if there are none."""
    return real_only(values, routing).sum(dim=0) / routing.num_real_tokens.clamp(min=1)


def real_only(values: Tensor, routing: Routing) -> Tensor:
    """Return (T, ...) values with 0 for padding."""
    if routing.mask_T is None:
        return values
    return values.masked_fill(~routing.mask_T.view(-1, *[1] * (values.ndim - 1)), 0)


def sum_of_scores(routing: Routing, needed_by: str) -> Tensor:
    """Return each expert's normalised score, summed over the real tokens, (E,)."""
    return real_only(normalized_scores(routing, needed_by), routing).sum(dim=0)


def load_times_scores(pairs_E: Tensor, scores_E: Tensor, num_tokens: Tensor | int) -> Tensor:
    """Return E * sum_i f_i P_i from the sums that define f and P, for each index of the leading axes."""
    pairs_E = pairs_E.to(scores_E.dtype)
    load_E = pairs_E / pairs_E.sum(dim=-1, keepdim=True).clamp(min=1)
    mean_E = scores_E / torch.as_tensor(num_tokens, device=scores_E.device).clamp(min=1)
    return scores_E.shape[-1] * (load_E * mean_E).sum(dim=-1)
