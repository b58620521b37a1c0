"""Plans (pairs sorted by expert) and the dispatcher interface.

The dispatcher that moves tokens between ranks is in `moe_ffn.training.parallel`.

T tokens, D model width, E experts, N (token, expert) pairs, R rows
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ffn.kernels.routing import sort_by_expert
from moe_ffn.outputs import PairsOnlyRouting, Plan, Routing


def make_plan(routing: Routing, num_experts: int | None = None) -> Plan:
    """Sort the pairs of a routing by expert, in token order. Only pairs of the first `num_experts` experts,
    which have networks, are computed; None: of all.
    """
    num_experts = routing.num_experts if num_experts is None else num_experts
    uncomputed_N = routing.uncomputed_N
    if num_experts < routing.num_experts:
        uncomputed_N = uncomputed_N | (routing.expert_ids_N >= num_experts)
    return plan_of_pairs(
        routing.token_indices_N,
        routing.expert_ids_N.masked_fill(uncomputed_N, num_experts),
        routing.weights_N.masked_fill(uncomputed_N, 0),
        num_experts,
    )


def plan_of_pairs(
    token_indices_N: Tensor, expert_ids_N: Tensor, weights_N: Tensor, num_experts: int
) -> Plan:
    """Return the plan for pairs in token order; pairs with expert id `num_experts` are not computed."""
    order_N, offsets_E = sort_by_expert(expert_ids_N, num_experts)
    return Plan(
        token_indices_N=token_indices_N.index_select(0, order_N),
        weights_N=weights_N.index_select(0, order_N),
        offsets_E=offsets_E,
        pair_ids_N=order_N,
    )


def unsorted_plan(routing: Routing, num_experts: int) -> Plan:
    """Return a plan in the router's order, for experts that are table rows. Its `offsets_E` is empty, since
    there may be millions; pairs not computed have weight and expert 0.
    """
    uncomputed_N = routing.uncomputed_N | (routing.expert_ids_N >= num_experts)
    return Plan(
        token_indices_N=routing.token_indices_N,
        weights_N=routing.weights_N.masked_fill(uncomputed_N, 0),
        offsets_E=routing.expert_ids_N.new_zeros(0, dtype=torch.int32),
        pair_ids_N=torch.arange(uncomputed_N.shape[0], device=uncomputed_N.device),
        expert_ids_N=routing.expert_ids_N.masked_fill(uncomputed_N, 0),
        pairs_per_token=routing.pairs_per_token if isinstance(routing, PairsOnlyRouting) else None,
    )


class Dispatched(ABC):
    """Dispatched tokens; other work can overlap with their transfer until `rows` waits for it."""

    plan: Plan
    """Pairs of this rank's experts; its `token_indices_N` are indices into the result of `rows`."""

    @abstractmethod
    def rows(self) -> Tensor:
        """Wait for the transfer and return the tokens of `plan`, (R, D)."""

    @abstractmethod
    def combine(self, y_RD: Tensor) -> Tensor:
        """Return the experts' outputs for the dispatched tokens, (T, D)."""


class Dispatcher(ABC):
    """Sends tokens to the ranks of their experts, and returns the outputs."""

    @abstractmethod
    def dispatch(self, x_TD: Tensor, plan: Plan) -> Dispatched:
        """Begin to send each token to the ranks of its experts."""


class LocalDispatcher(Dispatcher):
    """Dispatcher for experts that are all on this rank; no token moves."""

    def dispatch(self, x_TD: Tensor, plan: Plan) -> Dispatched:
        return _LocalDispatched(x_TD, plan)


@dataclass(frozen=True)
class _LocalDispatched(Dispatched):
    x_TD: Tensor
    plan: Plan

    def rows(self) -> Tensor:
        return self.x_TD

    def combine(self, y_RD: Tensor) -> Tensor:
        return y_RD
