"""The newest good checkpoint of a run, why others are passed over, and how single values in them are checked.

Nothing is taken for granted of what a file holds: neither how deep it is, nor how long, nor how large.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError
from torch import Tensor, nn

from moe_ffn.config.errors import explain, printable, shorten, show
from moe_ffn.runs.config import differences
from moe_ffn.training.recovery.checkpoint_file import (
    BEST_NAME,
    IDENTITY,
    CheckpointError,
    read_checkpoint,
)


@dataclass(frozen=True)
class GoodCheckpoint:
    """A checkpoint that was read and fits the run."""

    path: Path
    values: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.values["global_step"]


def newest_good(
    candidates: Iterable[Path], refusal: Callable[[Mapping[str, Any]], str | None]
) -> tuple[GoodCheckpoint | None, list[str]]:
    """The first checkpoint that can be read and that `refusal` accepts.

    Returns:
        that checkpoint, or None; and what is wrong with those before it, such as
        `step_00000012.ckpt is empty`.
    """
    passed_over: list[str] = []
    for path in candidates:
        try:
            values = read_checkpoint(path)
            reason = refusal(values)
            if reason is None:
                return GoodCheckpoint(path, values), passed_over
        except CheckpointError as error:
            reason = str(error)
        passed_over.append(printable(f"{path.name} {reason}"))
    return None, passed_over


def best_checkpoint(folder: Path) -> list[Path]:
    """The checkpoint of the best weights in a list, empty without one; a dangling link is listed too."""
    best = folder / BEST_NAME
    return [best] if os.path.lexists(best) else []


def refusal_of_weights(
    values: Mapping[str, Any], expected: Mapping[str, Any], model: nn.Module
) -> str | None:
    """Why the weights of a checkpoint do not go into a model; None where they do.

    Args:
        expected: the `identity` of a run that goes on, or the `identity_of_weights`; what else a checkpoint
            says of its run is not looked at.
        model: with the names that weights have in `values["state_dict"]`.

    Raises:
        CheckpointError: the checkpoint is malformed.
    """
    for name in ("state_dict", IDENTITY):
        if not isinstance(values.get(name), Mapping):
            raise CheckpointError(f"lacks '{name}', so it is no checkpoint of a run")
    require_plain(values[IDENTITY], IDENTITY)
    found = {key: values[IDENTITY].get(key) for key in expected}
    if isinstance(found["data"], Mapping):
        found["data"] = {key: found["data"].get(key) for key in expected["data"]}
    for key, (before, now) in differences(found, expected).items():
        return f"was made with {_short(key)} {_short(before)}, but this run has {_short(now)}"
    _require_weights(values["state_dict"], model)
    return None


def _require_weights(found: Mapping[str, Any], model: nn.Module) -> None:
    """Weights that go into a model, and are finite; a buffer may be a mask of infinities."""
    expected, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    first_names: dict[int, str] = {}
    for name, value in expected.items():
        if name not in found:
            raise CheckpointError(f"lacks the weight '{name}'")
        if not isinstance(value, Tensor):  # a user's own block may keep anything
            continue
        mine = found[name]
        if not isinstance(mine, Tensor) or mine.shape != value.shape:
            raise CheckpointError(
                f"has '{name}' in another shape than {tuple(value.shape)}: {describe(mine)}"
            )
        if mine.is_floating_point() != value.is_floating_point():
            raise CheckpointError(f"has '{name}' as {mine.dtype}, not {value.dtype}")
        require_same_kind(mine, value, f"state_dict.{name}")
        if bool(mine.isnan().any()):
            raise CheckpointError(f"holds NaN in '{name}'")
        if name in parameters:
            require_finite(mine.to(value.dtype), name)
            tied = first_names.setdefault(id(parameters[name]), name)
            if tied != name and not _same(found[tied], mine):
                raise CheckpointError(
                    f"has other numbers in '{name}' than in '{tied}', the same weight"
                )
    if unknown := [name for name in found if name not in expected]:
        raise CheckpointError(f"has the weight {show(unknown[0])}, which this model lacks")


def _same(first: Tensor, second: Tensor) -> bool:
    return first.dtype == second.dtype and torch.equal(first, second)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:12]}..."


# -- single values

MAX_WHOLE_NUMBER = 2**53
"""No number of steps or tokens is larger."""

MAX_LEVELS = 50
"""The deepest that a config may be nested."""

_NUMBERS = {torch.float16, torch.bfloat16, torch.float32, torch.float64}
_NUMBERS |= {torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64}


def malformed(path: str, problem: str) -> CheckpointError:
    """The error to raise about the value at `path`, a dotted key."""
    return CheckpointError(f"is malformed: {shorten(printable(path), 120)}: {problem}")


def require_same_kind(found: Any, template: Any, path: str) -> None:
    """Require the keys, lengths and kinds of values of a template.

    Args:
        template: an example. A whole number matches any from 0 on, a float any finite number, a tensor
            those of its shape and kind of numbers, a TypeAdapter what it accepts.

    Raises:
        CheckpointError: `found` does not match it.
    """
    if isinstance(template, TypeAdapter):
        try:
            template.validate_python(found)
        except ValidationError as error:
            where, _, problem = explain(error)[0].rpartition(": ")
            raise malformed(f"{path}.{where}".rstrip("."), problem) from None
    elif isinstance(template, Mapping):
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
        expected = {bool: "true or false", type(None): "null", str: "text"}
        kind = expected.get(type(template), "other")
        raise malformed(path, f"must be {kind}, got {describe(found)}")


def require_keys(found: Any, keys: Iterable[Any], path: str) -> None:
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
    found: Any, shape: Sequence[int] | None, path: str, *, is_float: bool | None = None
) -> None:
    """A tensor that holds ordinary numbers, one after the other, on the CPU.

    Args:
        shape: of the tensor; None where it may have any.
        is_float: whether its numbers are floating-point ones; None where either may be.
    """
    is_plain = isinstance(found, Tensor) and not found.is_nested
    if not is_plain or (shape is not None and found.shape != tuple(shape)):
        wanted = "" if shape is None else f" {tuple(shape)}"
        raise malformed(path, f"must be a tensor{wanted}, got {describe(found)}")
    if problem := _problem(found):
        raise malformed(path, problem)
    if is_float is not None and found.is_floating_point() != is_float:
        numbers = "floating-point numbers" if is_float else "whole numbers"
        raise malformed(path, f"must hold {numbers}, got {_dtype(found)}")


def require_ordinary(value: Tensor) -> Tensor:
    """ValueError where a tensor is not one of ordinary numbers on the CPU."""
    if problem := _problem(value):
        raise ValueError(problem)
    return value


def _problem(found: Tensor) -> str:
    """Why a tensor is not one of ordinary numbers on the CPU; empty where it is."""
    if type(found) is not Tensor or found.requires_grad:
        return f"must be a plain tensor, got a {type(found).__name__} with a gradient"
    if found.is_nested or found.layout != torch.strided or found.is_quantized:
        return "must be a plain tensor, got a sparse, nested or quantized one"
    if found.device.type != "cpu":
        return "must hold values, got a tensor without any"
    least = 1  # numbers between two of the next dimension, so that each has a place of its own
    for stride, size in sorted(zip(found.stride(), found.shape, strict=True)):
        if size > 1 and stride < least:
            return "has several numbers in one place"  # and may claim more than any memory holds
        least = max(least, stride * size)
    return "" if found.dtype in _NUMBERS else f"must hold ordinary numbers, got {_dtype(found)}"


def require_finite(found: Tensor, path: str) -> None:
    """Neither NaN nor infinity."""
    if not bool(found.isfinite().all()):
        what = "NaN" if bool(found.isnan().any()) else "infinity"
        raise CheckpointError(f"holds {what} in '{path}'")


def require_plain(found: Any, path: str, levels: int = MAX_LEVELS) -> None:
    """Nested mappings and lists of text, numbers, true, false and null, as a config is made of."""
    if levels == 0:
        raise malformed(path, f"is nested more than {MAX_LEVELS} levels deep")
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
