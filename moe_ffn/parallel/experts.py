"""Expert parallelism: each rank holds some of the experts of a layer, and tokens travel to theirs and back.

T tokens, D model width, E experts, P ranks, N (token, expert) pairs, R rows that travel
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as collectives

from moe_ffn.dispatch import Plan, plan_of_pairs
from moe_ffn.errors import ConfigError
from moe_ffn.experts.base import Experts


class ParallelExperts(Experts):
    """The experts of this rank, behind an exchange of tokens with the other ranks of a group.

    A token is sent once to each rank that holds an expert of its own, however many those are, and comes back
    as the weighted sum of what they made of it. So routing that is limited to groups sends less.
    """

    def __init__(self, local: Experts, num_experts: int, group: dist.ProcessGroup) -> None:
        """Around `local`, which holds experts `rank * E / P` and the next ones of E in all.

        Raises:
            ConfigError: the ranks cannot hold equally many of them.
        """
        super().__init__()
        self.local = local
        self.group = group
        self.num_ranks = dist.get_world_size(group)
        self.num_local = experts_of_a_rank(num_experts, self.num_ranks)

    def forward(self, x_TD: Tensor, plan: Plan) -> Tensor:
        sent = _Parcels.of(plan, len(x_TD), self.num_ranks)
        counts_P2 = torch.stack([sent.rows_P, sent.pairs_P], dim=1)
        theirs_P2 = torch.empty_like(counts_P2)
        dist.all_to_all_single(theirs_P2, counts_P2, group=self.group)
        # The one place at which the host waits for the device.
        rows, pairs, their_rows, their_pairs = torch.cat([counts_P2, theirs_P2], 1).t().tolist()

        arrived_RD = self._exchange(x_TD.index_select(0, sent.token_ids_R), rows, their_rows)
        weights_N = plan.weights_N.index_select(0, sent.pair_ids_N)
        weights_N = self._exchange(weights_N[:, None], pairs, their_pairs).squeeze(1)
        labels_N2 = torch.stack([sent.row_ids_N, sent.expert_ids_N % self.num_local], dim=1)
        labels_N2 = self._exchange(labels_N2, pairs, their_pairs)

        made_RD = self.local(
            arrived_RD, self._local_plan(labels_N2, weights_N, their_rows, their_pairs)
        )
        back_RD = self._exchange(made_RD, their_rows, rows)
        return torch.zeros_like(x_TD).index_add(0, sent.token_ids_R, back_RD)

    def _exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Rows for each rank in turn against those from each; gradients take the way back."""
        if not x.is_floating_point():
            out = x.new_empty(sum(received), *x.shape[1:])
            dist.all_to_all_single(out, x.contiguous(), received, sent, group=self.group)
            return out
        out = collectives.all_to_all_single_autograd(x.contiguous(), received, sent, self.group)
        return collectives.wait_tensor(out)  # kernels read its pointer

    def _local_plan(
        self, labels_N2: Tensor, weights_N: Tensor, rows: list[int], pairs: list[int]
    ) -> Plan:
        """The plan of the pairs that arrived, which come rank after rank and so by row."""
        row_ids_N, expert_ids_N = labels_N2.unbind(1)
        device = labels_N2.device
        starts_P = torch.tensor([0, *rows[:-1]], device=device).cumsum(0)
        row_ids_N = row_ids_N + starts_P.repeat_interleave(torch.tensor(pairs, device=device))
        return plan_of_pairs(row_ids_N, expert_ids_N, weights_N, self.num_local)

    def extra_repr(self) -> str:
        return f"num_ranks={self.num_ranks}, experts_of_a_rank={self.num_local}"


def experts_of_a_rank(num_experts: int, num_ranks: int) -> int:
    """
    Raises:
        ConfigError: the ranks cannot hold equally many of them.
    """
    if num_experts % num_ranks:
        raise ConfigError(
            f"parallel.expert ({num_ranks}) must divide num_experts ({num_experts}): every rank holds as "
            "many experts; change one of them"
        )
    return num_experts // num_ranks


@dataclass(frozen=True)
class _Parcels:
    """What a rank sends to each of the others."""

    token_ids_R: Tensor
    """The token of each row; rows are sorted by rank, then by token."""
    rows_P: Tensor
    """Rows for each rank."""
    pair_ids_N: Tensor
    """The pairs that are computed, by their places in the plan, sorted by row."""
    expert_ids_N: Tensor
    """The expert of each of them."""
    row_ids_N: Tensor
    """The row of each of them, counted from the first one of its rank."""
    pairs_P: Tensor
    """Pairs for each rank."""

    @classmethod
    def of(cls, plan: Plan, num_tokens: int, num_ranks: int) -> _Parcels:
        ends_E = plan.offsets_E.long()
        experts_E = torch.arange(len(ends_E), device=ends_E.device)
        expert_ids_N = experts_E.repeat_interleave(ends_E.diff(prepend=ends_E.new_zeros(1)))
        num_local = len(ends_E) // num_ranks
        rank_ids_N = expert_ids_N // num_local
        token_ids_N = plan.token_ids_N.narrow(0, 0, len(expert_ids_N))
        # Pairs are sorted by expert, so by rank: one number for rank and token sorts the rows.
        keys_R, of_pair_N = (rank_ids_N * num_tokens + token_ids_N).unique(return_inverse=True)
        rows_P = (keys_R // max(num_tokens, 1)).bincount(minlength=num_ranks)
        starts_P = rows_P.cumsum(0) - rows_P
        row_ids_N, order_N = of_pair_N.sort(stable=True)
        return cls(
            token_ids_R=keys_R % max(num_tokens, 1),
            rows_P=rows_P,
            pair_ids_N=order_N,
            expert_ids_N=expert_ids_N.index_select(0, order_N),
            row_ids_N=row_ids_N - starts_P.index_select(0, rank_ids_N),  # which rows do not reorder
            pairs_P=rank_ids_N.bincount(minlength=num_ranks),
        )
