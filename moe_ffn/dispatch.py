"""The plan of a dispatch: pairs sorted by expert. No token moves here; `moe_ffn.parallel` moves them.

T tokens, D model width, E experts, N (token, expert) pairs, R rows
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ffn.kernels.native.routing import sort_by_expert
from moe_ffn.outputs import ListedRouting, Plan, Routing


def make_plan(routing: Routing, num_experts: int | None = None) -> Plan:
    """Sort the pairs by expert; a stable sort, so ties keep token order.

    Args:
        num_experts: the experts in the plan, the first ones; those behind them have no network
            (`ffn.zero_computation`). All experts when None.
    """
    num_experts = routing.num_experts if num_experts is None else num_experts
    left_out_N = routing.left_out_N
    if num_experts < routing.num_experts:
        left_out_N = left_out_N | (routing.expert_ids_N >= num_experts)
    return plan_of_pairs(
        routing.token_ids_N,
        routing.expert_ids_N.masked_fill(left_out_N, num_experts),
        routing.weights_N.masked_fill(left_out_N, 0),
        num_experts,
    )


def plan_of_pairs(
    token_ids_N: Tensor, expert_ids_N: Tensor, weights_N: Tensor, num_experts: int
) -> Plan:
    """The plan of pairs that are sorted by token; those of an expert `num_experts` are not computed."""
    order_N, offsets_E = sort_by_expert(expert_ids_N, num_experts)
    return Plan(
        token_ids_N=token_ids_N.index_select(0, order_N),
        weights_N=weights_N.index_select(0, order_N),
        offsets_E=offsets_E,
        pair_ids_N=order_N,
    )


def plan_of_list(routing: Routing, num_experts: int) -> Plan:
    """The pairs as the router listed them, with their experts, and `offsets_E` empty: nothing has E numbers.

    For experts that are rows of a table, which need no sorting. Pairs that are not computed have weight 0,
    and the first expert.
    """
    left_out_N = routing.left_out_N | (routing.expert_ids_N >= num_experts)
    return Plan(
        token_ids_N=routing.token_ids_N,
        weights_N=routing.weights_N.masked_fill(left_out_N, 0),
        offsets_E=routing.expert_ids_N.new_zeros(0, dtype=torch.int32),
        pair_ids_N=torch.arange(left_out_N.shape[0], device=left_out_N.device),
        expert_ids_N=routing.expert_ids_N.masked_fill(left_out_N, 0),
        listed_k=routing.listed_k if isinstance(routing, ListedRouting) else None,
    )


class Dispatched(ABC):
    """Tokens on their way to their experts; time for other work until `rows` is read."""

    plan: Plan
    """The pairs that the experts of this rank compute; a token of it is a row of `rows`."""

    @abstractmethod
    def rows(self) -> Tensor:
        """(R, D), the tokens of `plan`; waits for them."""

    @abstractmethod
    def combine(self, y_RD: Tensor) -> Tensor:
        """(T, D), the outputs of the experts for the tokens that were dispatched."""


class Dispatcher(ABC):
    """Brings tokens to the experts of a plan, and their outputs back."""

    @abstractmethod
    def dispatch(self, x_TD: Tensor, plan: Plan) -> Dispatched: ...


class LocalDispatcher(Dispatcher):
    """All experts are here, and nothing moves."""

    def dispatch(self, x_TD: Tensor, plan: Plan) -> Dispatched:
        return _Here(x_TD, plan)


@dataclass(frozen=True)
class _Here(Dispatched):
    x_TD: Tensor
    plan: Plan

    def rows(self) -> Tensor:
        return self.x_TD

    def combine(self, y_RD: Tensor) -> Tensor:
        return y_RD
