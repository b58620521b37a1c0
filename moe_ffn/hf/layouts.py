"""Layouts: how tensors of transformers map to parts of our tensors, and back.

E experts, F hidden width, D model width, H heads
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from moe_ffn.hf.options import HFConfig


@dataclass(frozen=True)
class WeightSlice:
    """A tensor of transformers ("theirs") that holds a part of one of our tensors ("ours")."""

    name: str
    part: Callable[[Tensor], Tensor] = lambda ours: ours
    """Returns the view of our tensor that this tensor fills; both have the same shape."""
    order: tuple[int, Tensor] | None = None
    """(dimension, indices): for each row or column of our tensor, its index in theirs."""
    rows: slice | None = None
    """Rows of their tensor to read, if its other rows belong to another of our tensors; for reading only."""
    added: float = 0.0
    """Constant to add to theirs to get ours; for reading only."""

    def from_hf(self, theirs: Tensor) -> Tensor:
        theirs = theirs if self.rows is None else theirs[self.rows]
        return theirs if self.order is None else theirs.index_select(*self.order)

    def to_hf(self, ours: Tensor) -> Tensor:
        if self.order is None:
            return ours
        dimension, indices = self.order
        return ours.index_select(dimension, indices.argsort().to(ours.device))


TensorLayout = Callable[[str, torch.Size, HFConfig], list[list[WeightSlice]]]
"""Function (prefix of their names, shape of our tensor, their options) -> alternative forms of our tensor in
files, each a list of slices. An export writes the first form."""


def named(*names: str) -> TensorLayout:
    """Return the layout of a tensor that is stored unchanged under one of these names."""
    return lambda prefix, shape, their: [[WeightSlice(prefix + name)] for name in names]


def zero_centered(name: str) -> TensorLayout:
    """Return the layout of a norm's scale that is stored as its difference from 1."""
    return lambda prefix, shape, their: [[WeightSlice(prefix + name, added=1.0)]]


def stacked(fused: str, *per_expert: str) -> TensorLayout:
    """Return the layout of stacked experts, stored as `fused` or as tensors per expert. Their names, gate
    before up, have `{}` for its number.
    """

    def layout(prefix: str, shape: torch.Size, hf: HFConfig) -> list[list[WeightSlice]]:
        slices = [
            WeightSlice(
                prefix + name.format(expert),
                lambda ours, expert=expert, i=i: ours[expert].chunk(len(per_expert))[i],
            )
            for expert in range(shape[0])
            for i, name in enumerate(per_expert)
        ]
        return [slices, [WeightSlice(prefix + fused)]]

    return layout


def halves(first: str, second: str) -> TensorLayout:
    """Return the layout of stacked experts whose gates and ups are two tensors."""
    return lambda prefix, shape, their: [
        [
            WeightSlice(prefix + name, lambda ours, i=i: ours.chunk(2, 1)[i])
            for i, name in enumerate((first, second))
        ]
    ]


def rows_of(name: str, index: int = 0) -> TensorLayout:
    """Return the layout, for reading only, of block `index` of equally many rows of a larger tensor."""
    return lambda prefix, shape, their: [
        [WeightSlice(prefix + name, rows=slice(index * shape[0], (index + 1) * shape[0]))]
    ]


def interleaved(name: str) -> TensorLayout:
    """Return the layout of alternating gate and up, as in GPT-OSS: in matrices (in, out), or biases."""

    def layout(prefix: str, shape: torch.Size, hf: HFConfig) -> list[list[WeightSlice]]:
        columns = torch.arange(shape[1]).view(-1, 2).T.flatten()
        part = _transpose if len(shape) == 3 else WeightSlice.part
        return [[WeightSlice(prefix + name, part, (-1, columns))]]

    return layout


def transposed(name: str) -> TensorLayout:
    """Return the layout of (in, out) matrices; ours are (out, in)."""
    return lambda prefix, shape, their: [[WeightSlice(prefix + name, _transpose)]]


def _transpose(ours: Tensor) -> Tensor:
    return ours.mT


def rotary(stem: str, heads_option: str | None, plain_option: str) -> TensorLayout:
    """Return the layout of a projection whose last rows are rotated by RoPE: per head, in total if
    `heads_option` is None. DeepSeek-V3 rotates neighbouring units (0, 1), (2, 3), ...; our decoder, and
    theirs without `rope_interleave`, rotate unit i with unit i + half. `plain_option` counts rows that are
    not rotated.
    """

    def layout(prefix: str, shape: torch.Size, hf: HFConfig) -> list[list[WeightSlice]]:
        heads = hf.count(heads_option) if heads_option else 1
        plain, rotated = hf.count(plain_option), hf.count("qk_rope_head_dim")
        order = None
        if hf["rope_interleave"]:
            rows_Hd = torch.arange(heads * (plain + rotated)).view(heads, -1)
            rotated_Hd = rows_Hd[:, plain:].unflatten(1, (-1, 2)).mT.flatten(1)
            order = 0, torch.cat([rows_Hd[:, :plain], rotated_Hd], dim=1).flatten()
        return [[WeightSlice(f"{prefix}{stem}.weight", order=order)]]

    return layout


def linear(**stems: str | tuple[str, ...]) -> dict[str, TensorLayout]:
    """Return the layouts of weights and biases of linear modules, each under its name or one of several; `__`
    in our names means a dot.
    """
    return {
        f"{ours.replace('__', '.')}.{kind}": named(
            *(f"{stem}.{kind}" for stem in ((theirs,) if isinstance(theirs, str) else theirs))
        )
        for ours, theirs in stems.items()
        for kind in ("weight", "bias")
    }


def gate_up_down(ours: str, *theirs: str) -> dict[str, TensorLayout]:
    """Return the layouts of a gated block of three linear modules, under one of these names."""
    parts = ("gate", "up", "down")
    return linear(**{f"{ours}.{p}": tuple(f"{stem}.{p}_proj" for stem in theirs) for p in parts})
