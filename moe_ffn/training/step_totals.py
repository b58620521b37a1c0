"""What the batches and ranks of one optimizer step have together, counted before it is trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ffn.balancing.losses import pairs_per_expert
from moe_ffn.outputs import Routing


@dataclass(frozen=True)
class StepTotals:
    """What the batches and ranks of one optimizer step have together, for the global-batch rule."""

    pairs_E: dict[str, Tensor]
    """Real pairs per expert of each sparse layer."""

    num_tokens: dict[str, Tensor]
    """Real tokens of each sparse layer."""

    num_parts: int
    """Batches times ranks. Lightning takes the mean over the parts, so each part's loss is multiplied
    by this."""


def count_step(
    batches: Iterable[Mapping[str, Routing]], reduce: Callable[[Tensor], Tensor], num_ranks: int = 1
) -> StepTotals:
    """The totals of a step from its batches' routings on this rank.

    Args:
        batches: the routings by layer of each batch.
        reduce: the sum of a tensor over the ranks.
        num_ranks: how many there are.
    """
    pairs: dict[str, Tensor] = {}
    tokens: dict[str, Tensor] = {}
    num_batches = 0
    for routings in batches:
        num_batches += 1
        for name, routing in routings.items():
            routing = routing.detach()
            pairs_E, num_tokens = pairs_per_expert(routing), routing.num_real_tokens
            pairs[name] = pairs[name] + pairs_E if name in pairs else pairs_E
            tokens[name] = tokens[name] + num_tokens if name in tokens else num_tokens
    if pairs and num_ranks > 1:  # one exchange for all layers
        sizes = [len(pairs_E) for pairs_E in pairs.values()]
        flat = reduce(torch.cat([*pairs.values(), torch.stack(list(tokens.values()))]))
        *summed, summed_tokens = flat.split([*sizes, len(tokens)])
        pairs = dict(zip(pairs, summed, strict=True))
        tokens = dict(zip(tokens, summed_tokens.unbind(), strict=True))
    return StepTotals(pairs, tokens, num_batches * num_ranks)
