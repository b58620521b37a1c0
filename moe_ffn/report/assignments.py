"""Experts that the tokens of a text chose at each router, gathered batch by batch.

T tokens of a text, N (token, expert) pairs, E experts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from moe_ffn.ffn.base import RouterInfo
from moe_ffn.outputs import Routing
from moe_ffn.report.trace import origin

NOT_REACHED = -1
"""Value in `first_T` of a token that did not come to this router."""


@dataclass
class Assignment:
    """Experts that each token chose at one router."""

    name: str
    """Name, such as `layer_03` or `layer_03/inner`."""
    expert_names: tuple[str, ...]
    num_tokens: int
    """T"""
    first_T: np.ndarray = field(init=False)
    """Expert of the largest weight; E where the router chose none, NOT_REACHED where the token never came."""
    _pairs: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.first_T = np.full(self.num_tokens, NOT_REACHED, dtype=np.int32)

    def add(self, routing: Routing, came_from: np.ndarray, *, with_dropped: bool = True) -> None:
        """Count the pairs of a batch.

        Args:
            came_from: (routing.num_tokens,) place in the text of each token; NOT_REACHED for padding.
            with_dropped: count pairs that their expert had no place for.
        """
        kept = routing.real_N if with_dropped else routing.computed_N
        tokens = came_from[routing.token_ids_N[kept].cpu().numpy()].astype(np.int32)
        experts = routing.expert_ids_N[kept].cpu().numpy().astype(np.int32)
        weights = routing.weights_N[kept].detach().float().cpu().numpy()
        self.first_T[came_from[came_from >= 0]] = routing.num_experts
        # The heaviest is written last; among equals, the first that the router lists.
        order = np.lexsort((-np.arange(len(weights)), weights))
        self.first_T[tokens[order]] = experts[order]
        self._pairs.append((tokens, experts))

    @property
    def num_experts(self) -> int:
        """E"""
        return len(self.expert_names)

    @property
    def pairs(self) -> tuple[np.ndarray, np.ndarray]:
        """Return token and expert of each pair, (N,)."""
        tokens, experts = zip(*self._pairs, strict=True)
        return np.concatenate(tokens), np.concatenate(experts)

    @property
    def reached_T(self) -> np.ndarray:
        return self.first_T != NOT_REACHED


def add_batch(
    assignments: dict[str, Assignment],
    routings: Mapping[str, Routing],
    infos: Mapping[str, RouterInfo],
    first: int,
    num_tokens: int,
    *,
    with_dropped: bool = True,
) -> None:
    """Count the routings of a batch that begins at token `first` of a text of `num_tokens`.

    Routers that list pairs of very many experts are left out.
    """
    gates = [name for name, info in infos.items() if info.is_gate]
    for name, routing in routings.items():
        if routing.is_listed:
            continue
        if name not in assignments:
            info = infos.get(name)
            names = tuple(map(str, range(routing.num_experts)))
            if info is not None:
                names = ("through",) if info.is_gate else info.expert_names()
            assignments[name] = Assignment(name, names, num_tokens)
        places = came_from(routings, name, gates, first)
        assignments[name].add(routing, places, with_dropped=with_dropped)


def came_from(
    routings: Mapping[str, Routing], name: str, gates: Sequence[str], first: int
) -> np.ndarray:
    """Return the places in the text of a routing's tokens, in a batch that begins at token `first`."""
    inside = origin(routings, name, gates)
    if inside is None:
        return np.arange(routings[name].num_tokens) + first
    places = inside.cpu().numpy()
    return np.where(places < 0, NOT_REACHED, places + first)
