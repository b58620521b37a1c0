"""Memory for the gradients of large weights, used again from step to step."""

from __future__ import annotations

import sys
from threading import Lock

import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

LARGE_BYTES = 32 * 2**20
"""glibc keeps no freed memory of this size or more (the largest value that M_MMAP_THRESHOLD grows to)."""

ALIGNMENT = 64
"""Size in bytes of a cache line, and of the widest vector register."""

_buffers = WeakTensorKeyDictionary()
_lock = Lock()


def empty_gradient(weight: Tensor) -> Tensor:
    """An uninitialised, contiguous tensor like `weight`.

    A large one reuses the memory of an earlier gradient of the same weight that no tensor uses any more.
    That memory is freed together with the weight.
    """
    size = weight.numel() * weight.itemsize
    if size < LARGE_BYTES:
        return torch.empty_like(weight, memory_format=torch.contiguous_format)
    with _lock:
        if weight not in _buffers:
            _buffers[weight] = []
        buffers: list[bytearray] = _buffers[weight]
        # Every storage over a buffer holds a reference to it; torch has no other way to tell that the last of
        # them is gone. Then the list's and the argument's are left; a loop variable would be a third.
        in_use = [sys.getrefcount(buffers[i]) > 2 for i in range(len(buffers))]
        if all(in_use):
            in_use.append(False)
            buffers.append(bytearray(size + ALIGNMENT))
        bytes_B = torch.frombuffer(buffers[in_use.index(False)], dtype=torch.uint8)
        start = -bytes_B.data_ptr() % ALIGNMENT
        return bytes_B[start : start + size].view(weight.dtype).view(weight.shape)
