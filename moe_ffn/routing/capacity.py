"""Expert capacity: pure functions Routing -> Routing that drop the pairs that exceed it.

T tokens, E experts, N (token, expert) pairs, C capacity
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

import torch
from pydantic import Field, model_validator
from torch import Tensor

from moe_ffn.config.base import MAX_COUNT, Config
from moe_ffn.config.errors import Unsupported, UseCase
from moe_ffn.config.sizes import ceil_of_share, share_of
from moe_ffn.outputs import Routing, VariableKRouting


class CapacityConfig(Config, frozen=True):
    """Maximum number of (token, expert) pairs per expert.

    It is ceil(factor * pairs / num_experts), or `per_sequence`. A router of a variable number of experts
    counts tokens times `capacity_k` as its pairs.
    """

    factor: float | None = Field(default=None, gt=0, le=MAX_COUNT)
    """Capacity factor in training. 1: nothing is dropped if the load is perfectly balanced. num_experts, or
    null: nothing is ever dropped."""
    eval_factor: float | None = Field(default=None, gt=0, le=MAX_COUNT)
    """Capacity factor in evaluation. null by default, because dropping makes the output of a token depend on
    the rest of the batch."""
    drop: Literal["position", "probability", "choice", "random"] = "position"
    """Pairs that a full expert drops. `position`: the pairs at the latest positions. `probability`: those
    with the smallest weights. `choice`: tokens' second choices before first choices (GShard, NLLB). `random`:
    random pairs (in training). Only `position` is causal."""
    renormalize: bool = False
    """Rescale a token's remaining weights after dropping, so that their sum is the same as before."""
    per_sequence: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Maximum number of pairs of one sequence per expert, in training and evaluation; replaces both factors
    (Switch Transformers in transformers)."""

    @model_validator(mode="after")
    def _one_limit(self) -> CapacityConfig:
        for option in ("factor", "eval_factor"):
            value = getattr(self, option)
            if value is not None and self.per_sequence is not None:
                raise ValueError(
                    f"{option} ({value:g}) and per_sequence ({self.per_sequence}) both limit an expert; "
                    "set one of them to null"
                )
        return self

    @property
    def is_limited(self) -> bool:
        return not (self.factor is None and self.eval_factor is None and self.per_sequence is None)

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        """Return the reason why dropping is wrong in a use case; None if it is not."""
        if use_case.causal and self.drop != "position" and self.is_limited:
            return Unsupported(
                f"drop '{self.drop}' lets later tokens displace earlier ones", "use 'position'"
            )
        for option in ("eval_factor", "per_sequence"):
            value = getattr(self, option)
            if use_case.cached and value is not None:
                return Unsupported(
                    f"{option} ({value:g}) lets tokens displace each other", "set it to null"
                )
        return None

    def expert_capacity(self, routing: Routing, *, training: bool) -> Tensor | None:
        """Return the capacity of one expert in pairs, int64 scalar, by `factor` in training, else by
        `eval_factor`; None if dropless.
        """
        if self.per_sequence is not None:
            capacity = self.per_sequence * _num_sequences(routing)
            return torch.tensor(capacity, device=routing.dropped_N.device)
        factor = self.factor if training else self.eval_factor
        return None if factor is None else capacity_of(routing, factor)

    def apply_to(self, routing: Routing, *, training: bool) -> Routing:
        """Mark the pairs that exceed the capacity as dropped. `random` drops by position in evaluation."""
        drop = self.drop if training or self.drop != "random" else "position"
        priority, renormalize = DROP_POLICIES[drop], self.renormalize
        if self.per_sequence is not None:
            return drop_over_sequence_capacity(
                routing, self.per_sequence, priority, renormalize=renormalize
            )
        factor = self.factor if training else self.eval_factor
        return drop_over_capacity(routing, factor, priority, renormalize=renormalize)


Priority = Callable[[Routing], Tensor]
"""Routing -> (N,) values: an expert accepts pairs with lower values first, and equal values in pair order."""


def capacity_of(routing: Routing, factor: float) -> Tensor:
    """Return the expert capacity C = ceil(factor * N / E), int64 scalar.

    N counts the pairs of real tokens, so factor 1 suffices at perfect balance. Megatron-LM and DeepSpeed also
    count pairs; Switch and ST-MoE count tokens. If the number of pairs depends on the data, N is
    `VariableKRouting.capacity_k` times the number of real tokens.
    """
    capacity_k = routing.capacity_k if isinstance(routing, VariableKRouting) else None
    if capacity_k is None:
        share = share_of(factor, parts=routing.num_choices)
        return ceil_of_share(_limited(routing).sum(), share)
    share = share_of(factor, capacity_k, parts=routing.num_experts)
    return ceil_of_share(routing.num_real_tokens, share)


def drop_over_capacity(
    routing: Routing, factor: float | None, priority: Priority, *, renormalize: bool = False
) -> Routing:
    """Mark the pairs that exceed each expert's capacity (`capacity_of`) as dropped; with factor None, none.
    Experts accept pairs by `priority`, such as `by_position`. With `renormalize`, a token's remaining weights
    keep their sum.
    """
    if factor is None:
        return routing
    place_N = place_in_queue(routing, priority(routing))
    limited = replace(
        routing, dropped_N=_limited(routing) & (place_N >= capacity_of(routing, factor))
    )
    return renormalize_survivors(limited) if renormalize else limited


def drop_over_sequence_capacity(
    routing: Routing, count: int, priority: Priority, *, renormalize: bool = False
) -> Routing:
    """Mark the pairs beyond `count` per expert and sequence as dropped; see `drop_over_capacity`."""
    length, num_sequences = max(routing.sequence_length, 1), _num_sequences(routing)
    # One queue for each expert and sequence.
    queues_N = routing.expert_ids_N * num_sequences + routing.token_indices_N // length
    by_queue = replace(
        routing, expert_ids_N=queues_N, num_experts=routing.num_experts * num_sequences
    )
    place_N = place_in_queue(by_queue, priority(routing))
    limited = replace(routing, dropped_N=_limited(routing) & (place_N >= count))
    return renormalize_survivors(limited) if renormalize else limited


def _limited(routing: Routing) -> Tensor:
    """Return bool (N,), True for real pairs whose expert has a capacity."""
    return routing.active_N & (routing.expert_ids_N < routing.num_choices)


def _num_sequences(routing: Routing) -> int:
    return max(-(-routing.num_tokens // max(routing.sequence_length, 1)), 1)


def by_position(routing: Routing) -> Tensor:
    """Earlier positions, then earlier sequences first. Causal: no later token displaces an earlier one."""
    return routing.token_indices_N % max(routing.sequence_length, 1)


def by_probability(routing: Routing) -> Tensor:
    """Larger weights first, as in batch-prioritised routing (Riquelme et al. 2021, V-MoE). Not causal."""
    return -routing.weights_N.detach().nan_to_num(nan=-torch.inf)


def by_choice(routing: Routing) -> Tensor:
    """All first choices, then all second choices, each in pair order (GShard, arXiv:2006.16668, algorithm 1).

    A token's first choice is the pair with its largest weight, since not every router lists pairs by weight.
    Experts that process every token are no choices. Not causal: a later token's first choice displaces an
    earlier token's second choice.
    """
    # The rank of a pair within its token: one queue per token, not per expert.
    per_token = replace(
        routing, expert_ids_N=routing.token_indices_N, num_experts=routing.num_tokens
    )
    priority_N = by_probability(routing).masked_fill(~_limited(routing), torch.inf)
    return place_in_queue(per_token, priority_N)


def at_random(routing: Routing) -> Tensor:
    """Random order, from torch's generator (DeepSpeed's random token selection). Not causal."""
    # float32 even in a bf16 model, whose default dtype would give many pairs the same priority.
    return torch.rand(
        routing.token_indices_N.shape, dtype=torch.float32, device=routing.token_indices_N.device
    )


DROP_POLICIES: dict[str, Priority] = {
    "position": by_position,
    "probability": by_probability,
    "choice": by_choice,
    "random": at_random,
}
"""`capacity.drop` -> policy."""


def place_in_queue(routing: Routing, priority_N: Tensor) -> Tensor:
    """Return int64 (N,): the number of real pairs ahead of each pair in the queue of its expert."""
    # Padding goes to an additional expert, so that it displaces no real pair.
    expert_ids_N = routing.expert_ids_N.masked_fill(~routing.active_N, routing.num_experts)
    by_priority_N = priority_N.argsort(stable=True)
    order_N = by_priority_N[expert_ids_N[by_priority_N].argsort(stable=True)]
    sorted_N = expert_ids_N[order_N]
    ranks_N = torch.arange(order_N.shape[0], device=order_N.device)
    place_N = ranks_N - torch.searchsorted(sorted_N, sorted_N)  # rank minus the start of the queue
    return torch.empty_like(place_N).scatter_(0, order_N, place_N)


def renormalize_survivors(routing: Routing) -> Routing:
    """Scale each token's remaining weights to their sum before dropping.

    DeepSpeed scales their sum to 1, which is the same if the router's weights sum to 1. A token without
    remaining pairs keeps its weights, which are not used.
    """
    weights_N = torch.where(routing.active_N, routing.weights_N, 0)
    kept_N = torch.where(routing.computed_N, routing.weights_N, 0)
    zeros_T = weights_N.new_zeros(routing.num_tokens)
    before_T = zeros_T.index_add(0, routing.token_indices_N, weights_N)
    after_T = zeros_T.index_add(0, routing.token_indices_N, kept_N)
    tiny = torch.finfo(weights_N.dtype).tiny
    ratio_T = torch.where(after_T > 0, before_T / after_T.clamp(min=tiny), 1)
    return replace(routing, weights_N=routing.weights_N * ratio_T[routing.token_indices_N])
