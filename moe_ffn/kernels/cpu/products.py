"""Products of one stacked weight, and its gradient, expert by expert; and the memory they are written into.

E experts, N rows of one expert, O out, I in
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from threading import Lock

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

LARGE_BYTES = 32 * 2**20
"""From here on glibc's allocator keeps no freed memory (the limit to which M_MMAP_THRESHOLD grows)."""

ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vectors."""

_buffers = WeakTensorKeyDictionary()
_lock = Lock()


def empty_gradient(weight: Tensor) -> Tensor:
    """An uninitialised, contiguous tensor like `weight`.

    A large one reuses the memory of an earlier gradient of the same weight that no tensor uses any more.
    That memory is freed together with the weight.
    """
    if weight.numel() * weight.itemsize < LARGE_BYTES:
        return torch.empty_like(weight, memory_format=torch.contiguous_format)
    with _lock:
        if weight not in _buffers:
            _buffers[weight] = []
        buffers: list[bytearray] = _buffers[weight]
        # A tensor's storage holds a reference to its buffer: without one there are those of the list
        # and of the call.
        unused = [i for i in range(len(buffers)) if sys.getrefcount(buffers[i]) == 2]
        if not unused:
            unused = [len(buffers)]
            buffers.append(bytearray(weight.numel() * weight.itemsize + ALIGNMENT))
        return _aligned(buffers[unused[0]], weight)


def _aligned(buffer: bytearray, like: Tensor) -> Tensor:
    address = torch.frombuffer(buffer, dtype=torch.uint8).data_ptr()
    flat = torch.frombuffer(
        buffer, dtype=like.dtype, count=like.numel(), offset=-address % ALIGNMENT
    )
    return flat.view(like.shape)


class Workspace:
    """Scratch buffers by name, each large enough for every block.

    A fresh large buffer costs a page fault per 4 KiB when it is first written, which on a CPU can
    cost as much as the arithmetic on it.
    """

    def __init__(self, rows: int, dtype: torch.dtype) -> None:
        self.rows = rows
        self.dtype = dtype
        self._buffers: dict[str, Tensor] = {}

    def __call__(self, name: str, rows: int, width: int) -> Tensor:
        """The first `rows` rows of the buffer called `name`."""
        buffer = self._buffers.get(name)
        if buffer is None:
            buffer = torch.empty(self.rows, width, dtype=self.dtype, device="cpu")
            self._buffers[name] = buffer
        return buffer[:rows]


class Products:
    """Multiplies in `dtype`; a weight of another dtype is converted while its expert is at work."""

    def __init__(self, weight_EOI: Tensor, bias_EO: Tensor | None, dtype: torch.dtype) -> None:
        self.weight_E = weight_EOI.unbind()
        self.transposed_E = weight_EOI.mT.unbind()
        self.bias_E = None if bias_EO is None else bias_EO.to(dtype).unbind()
        self.converted = None if weight_EOI.dtype == dtype else _Converted(self.weight_E, dtype)

    def linear(self, expert: int, input_NI: Tensor, out_NO: Tensor) -> None:
        converted = self.converted
        weight_IO = self.transposed_E[expert] if converted is None else converted.of(expert).t()
        if self.bias_E is None:
            torch.mm(input_NI, weight_IO, out=out_NO)
        else:
            torch.addmm(self.bias_E[expert], input_NI, weight_IO, out=out_NO)

    def input_gradient(self, expert: int, grad_NO: Tensor, out_NI: Tensor) -> None:
        converted = self.converted
        weight_OI = self.weight_E[expert] if converted is None else converted.of(expert)
        torch.mm(grad_NO, weight_OI, out=out_NI)


class WeightGradient:
    """The gradient of a stacked weight and its bias; zero for experts that got no rows."""

    def __init__(self, weight_EOI: Tensor, bias_EO: Tensor | None, dtype: torch.dtype) -> None:
        self._weight_EOI = empty_gradient(weight_EOI)
        self._weight_E = self._weight_EOI.unbind()
        self._bias_EO = None if bias_EO is None else torch.zeros_like(bias_EO)
        self._idle = set(range(len(self._weight_E)))
        self._sum_OI = None
        if dtype != weight_EOI.dtype:
            self._sum_OI = torch.empty(weight_EOI.shape[1:], dtype=dtype, device="cpu")

    def add(self, expert: int, grad_NO: Tensor, input_NI: Tensor, continues: bool) -> None:
        """`continues`: the call before was this expert's too, and this one adds to it."""
        weight_OI = self._weight_E[expert]
        sum_OI = weight_OI if self._sum_OI is None else self._sum_OI
        if continues:
            sum_OI.addmm_(grad_NO.t(), input_NI)
        else:
            torch.mm(grad_NO.t(), input_NI, out=sum_OI)
        if self._sum_OI is not None:
            weight_OI.copy_(self._sum_OI)
        self._idle.discard(expert)

    def add_bias(self, expert: int, grad_O: Tensor) -> None:
        if self._bias_EO is not None:
            self._bias_EO[expert] += grad_O

    def finish(self) -> tuple[Tensor, Tensor | None]:
        """Of the weight and of the bias."""
        for expert in self._idle:
            self._weight_E[expert].zero_()
        return self._weight_EOI, self._bias_EO


class _Converted:
    """The weight of one expert at a time in `dtype`, in one buffer."""

    def __init__(self, weight_E: Sequence[Tensor], dtype: torch.dtype) -> None:
        self.weight_E = weight_E
        self.expert: int | None = None
        self.buffer_OI = torch.empty(weight_E[0].shape, dtype=dtype, device="cpu")

    def of(self, expert: int) -> Tensor:
        if self.expert != expert:
            self.expert = expert
            self.buffer_OI.copy_(self.weight_E[expert])
        return self.buffer_OI
