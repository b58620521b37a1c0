"""Tensors of transformers as parts of ours, both ways.

E experts, F hidden width, D model width, H heads
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ffn.weights.options import Theirs


@dataclass(frozen=True)
class Piece:
    """A tensor of theirs, as a part of one of ours."""

    name: str
    part: Callable[[Tensor], Tensor] = lambda ours: ours
    """The view of ours that it fills; of its shape."""
    order: tuple[int, Tensor] | None = None
    """(dimension, indices): which row or column of theirs stands at each place of ours."""
    rows: slice | None = None
    """The rows of theirs that it is, where other rows belong to another tensor of ours; not written."""
    added: float = 0.0
    """The difference of ours from it; not written."""

    def to_ours(self, theirs: Tensor) -> Tensor:
        theirs = theirs if self.rows is None else theirs[self.rows]
        return theirs if self.order is None else theirs.index_select(*self.order)

    def to_theirs(self, ours: Tensor) -> Tensor:
        if self.order is None:
            return ours
        dimension, places = self.order
        return ours.index_select(dimension, places.argsort().to(ours.device))


Layout = Callable[[str, torch.Size, Theirs], list[list[Piece]]]
"""(prefix of their names, shape of ours, their options) -> the forms in which theirs may hold it, in pieces;
the first is written."""


def named(*names: str) -> Layout:
    """The same tensor, under one of these names."""
    return lambda prefix, shape, their: [[Piece(prefix + name)] for name in names]


def zero_centered(name: str) -> Layout:
    """A norm's scale, of which theirs store the difference from 1."""
    return lambda prefix, shape, their: [[Piece(prefix + name, added=1.0)]]


def stacked(fused: str, *each: str) -> Layout:
    """The experts of a layer in one tensor, or in one for each expert, and for each of gate and up.

    Args:
        each: `{}` stands for the number of the expert.
    """

    def rows(expert: int, place: int, of: int) -> Callable[[Tensor], Tensor]:
        return lambda ours: ours[expert].chunk(of, dim=0)[place]

    def layout(prefix: str, shape: torch.Size, their: Theirs) -> list[list[Piece]]:
        by_expert = [
            Piece(prefix + name.format(expert), rows(expert, place, len(each)))
            for expert in range(shape[0])
            for place, name in enumerate(each)
        ]
        return [by_expert, [Piece(prefix + fused)]]

    return layout


def halves(first: str, second: str) -> Layout:
    """Gate and up of all experts, in a tensor each."""
    return lambda prefix, shape, their: [
        [
            Piece(prefix + name, lambda ours, i=i: ours.chunk(2, 1)[i])
            for i, name in enumerate((first, second))
        ]
    ]


def rows_of(name: str, place: int = 0) -> Layout:
    """As many rows of theirs as ours has; other rows belong to another tensor of ours, or to nothing."""
    return lambda prefix, shape, their: [
        [Piece(prefix + name, rows=slice(place * shape[0], (place + 1) * shape[0]))]
    ]


def interleaved(name: str, is_transposed: bool) -> Layout:
    """Gate and up whose columns take turns, as in GPT-OSS, of matrices (in, out)."""

    def layout(prefix: str, shape: torch.Size, their: Theirs) -> list[list[Piece]]:
        columns = torch.arange(shape[1]).view(-1, 2).T.flatten()
        part = _transpose if is_transposed else Piece.part
        return [[Piece(prefix + name, part, (-1, columns))]]

    return layout


def transposed(name: str) -> Layout:
    """Matrices (in, out)."""
    return lambda prefix, shape, their: [[Piece(prefix + name, _transpose)]]


def _transpose(ours: Tensor) -> Tensor:
    return ours.mT


def rotary(stem: str, num_heads: str | None, plain_width: str) -> Layout:
    """A projection whose last rows, of each head or of all together, rotary positions rotate.

    DeepSeek-V3 rotates neighbours (0, 1), (2, 3), ...; ours, and theirs without `rope_interleave`, unit i
    with unit i + half.
    """

    def layout(prefix: str, shape: torch.Size, their: Theirs) -> list[list[Piece]]:
        heads = their.count(num_heads) if num_heads else 1
        plain, rotary = their.count(plain_width), their.count("qk_rope_head_dim")
        piece = Piece(prefix + stem + ".weight")
        if their["rope_interleave"]:
            rows_Hd = torch.arange(heads * (plain + rotary)).view(heads, -1)
            last_Hd = rows_Hd[:, plain:].unflatten(1, (-1, 2)).mT.flatten(1)
            places = torch.cat([rows_Hd[:, :plain], last_Hd], dim=1).flatten()
            piece = Piece(piece.name, order=(0, places))
        return [[piece]]

    return layout


def linear(**stems: str) -> dict[str, Layout]:
    """Weights and biases of modules; `__` in our names stands for a dot."""
    return {
        f"{ours.replace('__', '.')}.{kind}": named(f"{theirs}.{kind}")
        for ours, theirs in stems.items()
        for kind in ("weight", "bias")
    }
