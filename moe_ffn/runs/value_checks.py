"""Checks of single values read from a checkpoint: their types, shapes and numbers.

What is wrong is raised as a CheckpointError, `is malformed: loops.fit_loop.state_dict: must be a mapping`.
Nothing is taken for granted of what a file holds: neither how deep it is, nor how long, nor how large.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_ffn.errors import printable, shorten, show
from moe_ffn.training.recovery.checkpoint_file import CheckpointError

MAX_WHOLE_NUMBER = 2**53
"""No number of steps or tokens is larger."""

_FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)
_MAX_LEVELS = 50
"""As deep as a config may be."""


def malformed(path: str, problem: str) -> CheckpointError:
    """The error to raise about the value at `path`, a dotted key."""
    return CheckpointError(f"is malformed: {shorten(printable(path), 120)}: {problem}")


def require_same_kind(found: Any, template: Any, path: str) -> None:
    """Mappings with the same keys and lists of the same length, of values of the same kinds.

    Args:
        template: as it should be: a whole number stands for any from 0 on, a number for any finite one, and
            a tensor for one of its shape, of floating-point numbers where it has those.

    Raises:
        CheckpointError: it is otherwise.
    """
    if isinstance(template, Mapping):
        require_keys(found, template, path)
        for key, value in template.items():
            require_same_kind(found[key], value, f"{path}.{key}")
    elif isinstance(template, list | tuple):
        if not isinstance(found, list | tuple) or len(found) != len(template):
            raise malformed(path, f"must be a list of {len(template)}, got {describe(found)}")
        for place, (mine, its) in enumerate(zip(found, template, strict=True)):
            require_same_kind(mine, its, f"{path}.{place}")
    elif isinstance(template, Tensor):
        require_tensor(found, template.shape, path, is_float=template.is_floating_point())
    elif type(template) is int:
        require_count(found, path)
    elif type(template) is float:
        if type(found) not in (int, float) or not math.isfinite(found) or abs(found) > 1e300:
            raise malformed(path, f"must be a finite number, got {describe(found)}")
    elif type(found) is not type(template):
        expected = {bool: "true or false", type(None): "null", str: "text"}.get(
            type(template), "other"
        )
        raise malformed(path, f"must be {expected}, got {describe(found)}")  # fmt: skip


def require_keys(found: Any, keys: Mapping[str, Any] | Sequence[Any], path: str) -> None:
    """A mapping with these keys and no other."""
    if not isinstance(found, Mapping):
        raise malformed(path, f"must be a mapping, got {describe(found)}")
    for key in keys:
        if key not in found:
            raise malformed(path, f"lacks '{key}'")
    for key in found:
        if key not in keys:
            raise malformed(path, f"has {show(key)}, which does not belong there")


def require_count(found: Any, path: str, least: int = 0, most: int = MAX_WHOLE_NUMBER) -> None:
    """A whole number from `least` to `most`."""
    if type(found) is not int or not least <= found <= most:
        bound = f"from {least} to {most}" if most < MAX_WHOLE_NUMBER else f"of at least {least}"
        raise malformed(path, f"must be a whole number {bound}, got {describe(found)}")


def require_tensor(
    found: Any, shape: Sequence[int], path: str, *, is_float: bool | None = None
) -> None:
    """A tensor of this shape that holds ordinary numbers, one after the other, on the CPU.

    Args:
        is_float: whether its numbers are floating-point ones; None where either may be.
    """
    if not isinstance(found, Tensor) or found.is_nested or found.shape != tuple(shape):
        raise malformed(path, f"must be a tensor {tuple(shape)}, got {describe(found)}")
    problem = ""
    if type(found) is not Tensor or found.requires_grad:
        problem = f"must be a plain tensor, got a {type(found).__name__} with a gradient"
    elif found.layout != torch.strided or found.is_quantized:
        problem = "must be a plain tensor, got a sparse or quantized one"
    elif found.device.type != "cpu":
        problem = "must hold values, got a tensor without any"
    elif found.is_complex() or (found.is_floating_point() and found.dtype not in _FLOATS):
        problem = f"must hold ordinary numbers, got {_dtype(found)}"
    elif is_float is not None and found.is_floating_point() != is_float:
        numbers = "floating-point numbers" if is_float else "whole numbers"
        problem = f"must hold {numbers}, got {_dtype(found)}"
    if problem:
        raise malformed(path, problem)


def require_dense(found: Tensor, path: str) -> None:
    """Each of its numbers has a place of its own: those that share one cannot be written, and may claim to be
    more than any memory holds.
    """
    least = 1
    for stride, size in sorted(zip(found.stride(), found.shape, strict=True)):
        if size > 1 and stride < least:
            raise malformed(path, "has several numbers in one place")
        least = max(least, stride * size)


def require_finite(found: Tensor, path: str) -> None:
    """Neither NaN nor infinity."""
    if not bool(found.isfinite().all()):
        what = "NaN" if bool(found.isnan().any()) else "infinity"
        raise CheckpointError(f"holds {what} in '{path}'")


def require_plain(found: Any, path: str, levels: int = _MAX_LEVELS) -> None:
    """Nested mappings and lists of text, numbers, true, false and null, as a config is made of."""
    if levels == 0:
        raise malformed(path, f"is nested more than {_MAX_LEVELS} levels deep")
    if isinstance(found, Mapping):
        for key, value in found.items():
            if not isinstance(key, str):
                raise malformed(path, f"must have keys of text, got {describe(key)}")
            require_plain(value, f"{path}.{key}", levels - 1)
    elif isinstance(found, list | tuple):
        for place, value in enumerate(found):
            require_plain(value, f"{path}.{place}", levels - 1)
    elif not isinstance(found, str | int | float | None) or (
        isinstance(found, int) and abs(found) > 2**64
    ):
        raise malformed(path, f"must be a plain value, got {describe(found)}")


def describe(found: Any) -> str:
    """A value in a few words, whatever it is."""
    if isinstance(found, Tensor):
        if found.is_nested:
            return "a nested tensor"
        return f"a tensor {tuple(found.shape)} of {_dtype(found)}"
    if isinstance(found, Mapping):
        return "a mapping"
    if isinstance(found, list | tuple):
        return f"a list of {len(found)}"
    return show(found)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
