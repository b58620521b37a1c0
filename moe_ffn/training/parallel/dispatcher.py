"""Expert parallelism: each rank holds some experts of a layer, and tokens travel to their experts and back.

T tokens, D model width, E experts, P ranks, N (token, expert) pairs, R rows that are sent or received
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives
from torch.distributed._functional_collectives import wait_tensor

from moe_ffn.ffn.dispatch import Dispatched, Dispatcher, plan_of_pairs
from moe_ffn.kernels.base import compute_dtype
from moe_ffn.outputs import Plan


class AllToAllDispatcher(Dispatcher):
    """Dispatcher that exchanges tokens between the ranks of a group, each of which holds E / P experts.

    A token is sent once to each rank that holds at least one of its experts. That rank returns the weighted
    sum of their outputs. Group-limited routing therefore sends less.
    """

    def __init__(self, num_experts: int, group: dist.ProcessGroup) -> None:
        """Rank r of `group` holds experts r * E / P to (r + 1) * E / P; P divides E."""
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        self.num_local, rest = divmod(num_experts, self.num_ranks)
        assert not rest

    def dispatch(self, x_TD: Tensor, plan: Plan) -> Dispatched:
        sent = _Outgoing.of(plan, len(x_TD), self.num_ranks)
        counts_P2 = torch.stack([sent.rows_P, sent.pairs_P], dim=1)
        received_P2 = torch.empty_like(counts_P2)
        dist.all_to_all_single(received_P2, counts_P2, group=self.group)
        # The host waits for the device, because sizes of the exchange are Python numbers.
        counts_P4 = torch.cat([counts_P2, received_P2], dim=1)
        rows_out, pairs_out, rows_in, pairs_in = counts_P4.t().tolist()

        weights_N = plan.weights_N.index_select(0, sent.pair_ids_N)
        weights_N = self._send(weights_N[:, None], pairs_out, pairs_in)
        labels_N2 = torch.stack([sent.row_ids_N, sent.expert_ids_N % self.num_local], dim=1)
        labels_N2 = self._send(labels_N2, pairs_out, pairs_in)
        # Sent last: NCCL keeps the order, so waiting for the smaller tensors does not wait for this one.
        # Cast to the dtype of autocast, because the experts would cast to it anyway.
        x_RD = x_TD.index_select(0, sent.token_ids_R).to(compute_dtype(x_TD))
        x_RD = self._send(x_RD, rows_out, rows_in)
        # A kernel reads the result of a collective by pointer, so it must wait.
        labels_N2, weights_N = wait_tensor(labels_N2), wait_tensor(weights_N).squeeze(1)
        local_plan = _local_plan(labels_N2, weights_N, rows_in, pairs_in, self.num_local)
        send_back = partial(self._send, num_sent=rows_in, num_received=rows_out)
        return _Exchanged(x_RD, local_plan, sent.token_ids_R, len(x_TD), x_TD.dtype, send_back)

    def _send(self, x: Tensor, num_sent: list[int], num_received: list[int]) -> Tensor:
        """Exchange rows with every rank; the backward pass sends gradients in the other direction."""
        if not x.is_floating_point():
            return collectives.all_to_all_single(x.contiguous(), num_received, num_sent, self.group)
        return collectives.all_to_all_single_autograd(
            x.contiguous(), num_received, num_sent, self.group
        )

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}(num_ranks={self.num_ranks}, experts_per_rank={self.num_local})"
        )


@dataclass(frozen=True)
class _Exchanged(Dispatched):
    x_RD: Tensor
    plan: Plan
    token_ids_R: Tensor
    """Token of each sent row."""
    num_tokens: int
    dtype: torch.dtype
    """Dtype of the tokens before sending."""
    send_back: Callable[[Tensor], Tensor]

    def rows(self) -> Tensor:
        return wait_tensor(self.x_RD)

    def combine(self, y_RD: Tensor) -> Tensor:
        y_RD = wait_tensor(self.send_back(y_RD))
        y_RD = y_RD.to(torch.promote_types(y_RD.dtype, torch.float32))
        sums_TD = y_RD.new_zeros(self.num_tokens, y_RD.shape[1])
        return sums_TD.index_add(0, self.token_ids_R, y_RD).to(self.dtype)


def _local_plan(
    labels_N2: Tensor, weights_N: Tensor, rows: list[int], pairs: list[int], num_experts: int
) -> Plan:
    """Return the plan of the received pairs, which are ordered by sending rank.

    `labels_N2` has the local expert of a pair, and its row from the first row of its rank. Adding that first
    row gives rows of all received tokens. `rows` and `pairs` count those of each rank.
    """
    row_ids_N, expert_ids_N = labels_N2.unbind(1)
    device = labels_N2.device
    starts_P = torch.tensor([0, *rows[:-1]], device=device).cumsum(0)
    row_ids_N = row_ids_N + starts_P.repeat_interleave(torch.tensor(pairs, device=device))
    return plan_of_pairs(row_ids_N, expert_ids_N, weights_N, num_experts)


@dataclass(frozen=True)
class _Outgoing:
    """Rows and (token, expert) pairs that this rank sends to each rank."""

    token_ids_R: Tensor
    """Token of each row; rows are sorted by rank, then by token."""
    rows_P: Tensor
    pair_ids_N: Tensor
    """Index in the plan of each computed pair; pairs are sorted by row."""
    expert_ids_N: Tensor
    """Expert of each pair in `pair_ids_N`."""
    row_ids_N: Tensor
    """Row of each pair in `pair_ids_N`, counted from the first row of its rank."""
    pairs_P: Tensor

    @classmethod
    def of(cls, plan: Plan, num_tokens: int, num_ranks: int) -> _Outgoing:
        ends_E = plan.offsets_E.long()
        experts_E = torch.arange(len(ends_E), device=ends_E.device)
        expert_ids_N = experts_E.repeat_interleave(ends_E.diff(prepend=ends_E.new_zeros(1)))
        num_local = len(ends_E) // num_ranks
        rank_ids_N = expert_ids_N // num_local
        token_indices_N = plan.token_indices_N.narrow(0, 0, len(expert_ids_N))
        # A key for each rank and token: `unique` makes one row of the pairs with equal keys, and sorts rows.
        keys_R, row_ids_N = (rank_ids_N * num_tokens + token_indices_N).unique(return_inverse=True)
        rows_P = (keys_R // max(num_tokens, 1)).bincount(minlength=num_ranks)
        starts_P = rows_P.cumsum(0) - rows_P
        row_ids_N, order_N = row_ids_N.sort(stable=True)
        return cls(
            token_ids_R=keys_R % max(num_tokens, 1),
            rows_P=rows_P,
            pair_ids_N=order_N,
            expert_ids_N=expert_ids_N.index_select(0, order_N),
            # `rank_ids_N` is sorted already, so sorting by row does not change it.
            row_ids_N=row_ids_N - starts_P.index_select(0, rank_ids_N),
            pairs_P=rank_ids_N.bincount(minlength=num_ranks),
        )
