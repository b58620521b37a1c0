"""Scratch memory that is written again and again instead of being asked for again and again."""

from __future__ import annotations

import torch
from torch import Tensor


class Workspace:
    """Buffers by name: the first rows of one that is large enough for every block.

    A fresh large buffer costs a page fault per 4 KiB when it is first written, which on a CPU can
    cost as much as the arithmetic on it.
    """

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self.rows = rows
        self.dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, rows: int, width: int) -> Tensor:
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = torch.empty(self.rows, width, dtype=self.dtype, device="cpu")
            self._buffers[name] = buffer
        return buffer[:rows]
