"""Statistics that are summed over batches, and the metrics of a sparse layer computed from the sums.

T tokens, E experts, B sequences
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from moe_ffn.balancing.sums import (
    normalized_scores,
    pairs_per_expert,
    pairs_per_sequence,
    real_only,
    token_entropy,
)
from moe_ffn.metrics.functional import coactivation_counts, rank_max_violation
from moe_ffn.outputs import Routing


@dataclass(eq=False)
class LayerBatch:
    """Routing of one layer in one batch, with cached values that several statistics share."""

    routing: Routing
    shared_share: Tensor | None = None
    """Entry of this layer in `FFNOutput.shared_shares`; None without a shared expert."""
    expert_capacity: Tensor | None = None
    """Maximum number of pairs of an expert; None without a capacity."""

    @cached_property
    def num_tokens(self) -> Tensor:
        return self.routing.num_real_tokens

    @cached_property
    def pairs_BE(self) -> Tensor:
        """Pairs of each sequence, without experts that process every token."""
        return pairs_per_sequence(self.routing)[:, : self.routing.num_choices]

    @cached_property
    def scores_TE(self) -> Tensor:
        """Normalised scores; 0 for padding."""
        return real_only(normalized_scores(self.routing, "TokenMetrics"), self.routing)


@dataclass(frozen=True)
class Statistic:
    """Tensor accumulated over batches and ranks, by sum or maximum."""

    name: str
    from_batch: Callable[[LayerBatch], Tensor]
    axes: Literal["", "E", "EE"] = ""
    dtype: torch.dtype = torch.float32
    reduce: Literal["sum", "max"] = "sum"

    def zeros(self, num_experts: int) -> Tensor:
        """Return the value before the first batch."""
        return torch.zeros([num_experts] * len(self.axes), dtype=self.dtype)

    def add(self, before: Tensor, batch: LayerBatch) -> Tensor:
        """Return the value after one more batch."""
        value = self.from_batch(batch).to(before.dtype)
        return before.maximum(value) if self.reduce == "max" else before + value


@dataclass(frozen=True)
class Measure:
    """Metric as a function of statistics."""

    value: Callable[..., Tensor]
    """Function of the values of `statistics`, in this order. Returns nan if the metric does not apply to a
    layer, such as `capacity_used` without a capacity."""
    statistics: tuple[Statistic, ...]


@dataclass(frozen=True, kw_only=True)
class RowEnd:
    """State of one layer at the end of a training row, for metrics that no single batch determines."""

    load_E: Tensor
    """Each expert's share of the (token, expert) pairs of the row."""
    idle_steps_E: Tensor
    """Optimizer steps since each expert last had a token."""
    dead_after_steps: int
    """Number of idle steps after which an expert counts as dead."""
    num_ranks: int
    num_networks: int
    """Number of experts with a network. They come first; the other experts are on no rank."""
    bias_E: Tensor | None
    """The correction bias of the router; None without one."""
    probe_choices: tuple[Tensor, Tensor] | None
    """Experts chosen for the probe batch at the previous row and at this one; None if either is missing."""


def count_of(
    name: str, from_batch: Callable[[LayerBatch], Tensor], axes: Literal["", "E", "EE"] = ""
) -> Statistic:
    """Return a statistic that sums int64 counts."""
    return Statistic(name, from_batch, axes, torch.int64)


PAIRS = count_of("pairs_E", lambda b: pairs_per_expert(b.routing), "E")
DROPPED = count_of("num_dropped", lambda b: (b.routing.dropped_N & b.routing.active_N).sum())
NUM_ALWAYS = Statistic(
    "num_always",
    lambda b: torch.full_like(b.num_tokens, b.routing.num_experts - b.routing.num_choices),
    dtype=torch.int64,
    reduce="max",
)
NUM_PAIRS = count_of("num_pairs", lambda b: b.routing.active_N.sum())
TOKENS = count_of("num_tokens", lambda b: b.num_tokens)
SEQUENCES = count_of("num_sequences", lambda b: b.pairs_BE.any(dim=-1).sum())
CHOSEN_TOGETHER = count_of("counts_EE", lambda b: coactivation_counts(b.routing), "EE")


def per_token(name: str, function: Callable[[Routing], Tensor]) -> Measure:
    """Return the mean over all real tokens of `function`, which returns the mean over one batch."""
    return averaged(name, lambda batch: function(batch.routing) * batch.num_tokens)


def averaged(
    name: str, from_batch: Callable[[LayerBatch], Tensor], count: Statistic = TOKENS
) -> Measure:
    """Return the sum of `from_batch` over batches, divided by the number of tokens or another count."""
    total = Statistic(name, from_batch)
    return Measure(lambda total, num: total / num.clamp(min=1), (total, count))


def load_from_counts(pairs_E: Tensor) -> Tensor:
    """Return each expert's share of the pairs; zeros without pairs."""
    return pairs_E / pairs_E.sum().clamp(min=1)


def of_choices(value: Callable[..., Tensor], *others: Statistic) -> Measure:
    """Return a measure of the pairs of each expert without the last ones, if they process every token."""

    def of_all(pairs_E: Tensor, num_always: Tensor, *rest: Tensor) -> Tensor:
        return value(pairs_E[: len(pairs_E) - int(num_always)], *rest)

    return Measure(of_all, (PAIRS, NUM_ALWAYS, *others))


def total_capacity(batch: LayerBatch) -> Tensor:
    """Return the maximum number of pairs of all experts together; 0 without a capacity."""
    if batch.expert_capacity is None:
        return torch.zeros_like(batch.num_tokens)
    return batch.expert_capacity * batch.routing.num_choices


TOTAL_CAPACITY = count_of("total_capacity", total_capacity)


def capacity_used(pairs_E: Tensor, num_dropped: Tensor, total_capacity: Tensor) -> Tensor:
    """Return the computed pairs as a share of the total capacity; nan without a capacity."""
    used = (pairs_E.sum() - num_dropped) / total_capacity
    return used.where(total_capacity > 0, torch.nan)


def entropy_of_mean(scores_E: Tensor) -> Tensor:
    """Return the entropy, in nats, of the mean router distribution, from the sum of its scores."""
    total = scores_E.sum().clamp(min=torch.finfo(scores_E.dtype).tiny)
    return token_entropy(scores_E / total)


def shared_share_times_tokens(batch: LayerBatch) -> Tensor:
    """Return the shared expert's share of the output norm, times the number of tokens; nan without one."""
    return batch.num_tokens * (torch.nan if batch.shared_share is None else batch.shared_share)


def row_rank_violation(row: RowEnd) -> Tensor | None:
    """Return MaxVio over ranks of the load of a row; None with a single rank."""
    if row.num_ranks == 1:
        return None
    return rank_max_violation(row.load_E[: row.num_networks], row.num_ranks)
