"""Memory of large gradients on a CPU, kept from one step to the next.

Freed memory of this size goes back to the system, and the next step pays for it page by page when it
writes: with many experts, of which a step uses a small part each, as much as a quarter of its time.
"""

from __future__ import annotations

import sys
from threading import Lock

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

LARGE_BYTES = 32 * 2**20
"""Where glibc's allocator stops keeping freed memory (the most that M_MMAP_THRESHOLD grows to)."""

ALIGNMENT = 64
"""Bytes of a cache line, and of the widest vectors."""

_buffers = WeakTensorKeyDictionary()
_lock = Lock()


def empty_gradient(weight: Tensor) -> Tensor:
    """An uninitialised, contiguous tensor like `weight`.

    A large one lies in the memory of an earlier gradient of the same weight, if no tensor uses that any
    more. It is given back when the weight is.
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
