"""State of torch around a call: autocast, a graph, a transform, tensors without data."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode


def is_autocast_on(x: Tensor) -> bool:
    """Return True if torch.autocast is on for the device of `x`; it knows none for `meta`."""
    return not x.is_meta and torch.is_autocast_enabled(x.device.type)


def without_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Turn autocast off, so that products keep the dtype of their factors."""
    return torch.autocast(x.device.type, enabled=False) if is_autocast_on(x) else nullcontext()


def has_no_data(x: Tensor) -> bool:
    """Return True for a tensor with a shape alone: on `meta`, or a FakeTensor."""
    module = sys.modules.get("torch._subclasses.fake_tensor")  # not loaded: there is none
    return x.is_meta or (module is not None and isinstance(x, module.FakeTensor))


def needs_static_shapes(x: Tensor) -> bool:
    """Return True if shapes must not depend on values: in a graph, or without values."""
    return torch.compiler.is_compiling() or has_no_data(x)


def is_dispatch_mode_on() -> bool:
    """Return True if a mode such as FlopCounterMode watches torch's operators; it sees none inside ours."""
    return _get_current_dispatch_mode() is not None


def is_transform_on() -> bool:
    """Return True inside `grad`, `jvp` or `vmap` of `torch.func`, or forward-mode differentiation."""
    # Private, and what `torch.autograd.Function.apply` itself asks; there is no public way.
    return torch._C._are_functorch_transforms_active() or is_forward_mode()


def is_forward_mode() -> bool:
    """Return True inside forward-mode differentiation, that of `torch.func.jvp` included."""
    return forward_ad._current_level >= 0


def is_batched(tensor: Tensor) -> bool:
    """Return True for a hidden batch axis, of `vmap` or of a backward pass with `is_grads_batched`."""
    functorch: Any = getattr(torch._C, "_functorch")  # noqa: B009  # typed nowhere
    if functorch.is_legacy_batchedtensor(tensor):
        return True
    while functorch.is_functorch_wrapped_tensor(tensor):
        if functorch.is_batchedtensor(tensor):
            return True
        tensor = functorch.get_unwrapped(tensor)
    return False


@contextmanager
def autograd_in_operators() -> Iterator[None]:
    """Enable gradients in the body of our operators too, where torch turns autograd off."""
    # Private; there is no public way.
    key = torch._C.DispatchKey.AutogradFunctionality
    with torch._C._SetExcludeDispatchKeyGuard(key, False), torch.enable_grad():
        yield
