"""Layouts: how tensors of transformers map to parts of our tensors, and back.

E experts, F hidden width, D model width, H heads
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ffn.weights.options import HFConfig


@dataclass(frozen=True)
class WeightSlice:
    """A tensor of transformers ("theirs") that is a part of one of our tensors ("ours")."""

    name: str
    part: Callable[[Tensor], Tensor] = lambda ours: ours
    """Returns the view of our tensor that this tensor fills; both have the same shape."""
    order: tuple[int, Tensor] | None = None
    """(dimension, indices): for each row or column of ours, its index in theirs."""
    rows: slice | None = None
    """Rows of theirs to read, if other rows belong to another tensor of ours; for reading only."""
    added: float = 0.0
    """Constant to add to theirs to get ours; for reading only."""

    def from_hf(self, theirs: Tensor) -> Tensor:
        theirs = theirs if self.rows is None else theirs[self.rows]
        return theirs if self.order is None else theirs.index_select(*self.order)

    def to_hf(self, ours: Tensor) -> Tensor:
        if self.order is None:
            return ours
        dimension, places = self.order
        return ours.index_select(dimension, places.argsort().to(ours.device))


Layout = Callable[[str, torch.Size, HFConfig], list[list[WeightSlice]]]
"""(prefix of their names, shape of ours, their options) -> possible forms, each a list of slices. The first
form is the one that is written."""


def named(*names: str) -> Layout:
    """Return the layout of a tensor that is stored unchanged under one of these names."""
    return lambda prefix, shape, their: [[WeightSlice(prefix + name)] for name in names]


def zero_centered(name: str) -> Layout:
    """Return the layout of a norm's scale that is stored as its difference from 1."""
    return lambda prefix, shape, their: [[WeightSlice(prefix + name, added=1.0)]]


def stacked(fused: str, *each: str) -> Layout:
    """Return the layout of stacked experts: one tensor per expert (and per gate and up), or one tensor.

    Args:
        fused: name of the single tensor.
        each: names of the tensors of an expert, with `{}` for its number.
    """

    def rows(expert: int, place: int, of: int) -> Callable[[Tensor], Tensor]:
        return lambda ours: ours[expert].chunk(of, dim=0)[place]

    def layout(prefix: str, shape: torch.Size, hf: HFConfig) -> list[list[WeightSlice]]:
        by_expert = [
            WeightSlice(prefix + name.format(expert), rows(expert, place, len(each)))
            for expert in range(shape[0])
            for place, name in enumerate(each)
        ]
        return [by_expert, [WeightSlice(prefix + fused)]]

    return layout


def halves(first: str, second: str) -> Layout:
    """Return the layout of gate and up of all experts in two tensors."""
    return lambda prefix, shape, their: [
        [
            WeightSlice(prefix + name, lambda ours, i=i: ours.chunk(2, 1)[i])
            for i, name in enumerate((first, second))
        ]
    ]


def rows_of(name: str, place: int = 0) -> Layout:
    """Return the layout of a tensor that is a block of rows of theirs, number `place`, for reading only."""
    return lambda prefix, shape, their: [
        [WeightSlice(prefix + name, rows=slice(place * shape[0], (place + 1) * shape[0]))]
    ]


def interleaved(name: str, is_transposed: bool) -> Layout:
    """Return the layout of (in, out) matrices in which columns of gate and up alternate, as in GPT-OSS."""

    def layout(prefix: str, shape: torch.Size, hf: HFConfig) -> list[list[WeightSlice]]:
        columns = torch.arange(shape[1]).view(-1, 2).T.flatten()
        part = _transpose if is_transposed else WeightSlice.part
        return [[WeightSlice(prefix + name, part, (-1, columns))]]

    return layout


def transposed(name: str) -> Layout:
    """Return the layout of (in, out) matrices; ours are (out, in)."""
    return lambda prefix, shape, their: [[WeightSlice(prefix + name, _transpose)]]


def _transpose(ours: Tensor) -> Tensor:
    return ours.mT


def rotary(stem: str, num_heads: str | None, plain_width: str) -> Layout:
    """Return the layout of a projection whose last rows, per head or in total, are rotated by RoPE.

    DeepSeek-V3 rotates neighbouring units (0, 1), (2, 3), ...; our decoder, and theirs without
    `rope_interleave`, rotate unit i with unit i + half.
    """

    def layout(prefix: str, shape: torch.Size, hf: HFConfig) -> list[list[WeightSlice]]:
        heads = hf.count(num_heads) if num_heads else 1
        plain, rotary = hf.count(plain_width), hf.count("qk_rope_head_dim")
        piece = WeightSlice(prefix + stem + ".weight")
        if hf["rope_interleave"]:
            rows_Hd = torch.arange(heads * (plain + rotary)).view(heads, -1)
            last_Hd = rows_Hd[:, plain:].unflatten(1, (-1, 2)).mT.flatten(1)
            places = torch.cat([rows_Hd[:, :plain], last_Hd], dim=1).flatten()
            piece = WeightSlice(piece.name, order=(0, places))
        return [[piece]]

    return layout


def linear(**stems: str) -> dict[str, Layout]:
    """Return the layouts of weights and biases of linear modules; `__` in our names means a dot."""
    return {
        f"{ours.replace('__', '.')}.{kind}": named(f"{theirs}.{kind}")
        for ours, theirs in stems.items()
        for kind in ("weight", "bias")
    }
