"""Which checkpoint of a run is the newest good one, and why the others are not."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_ffn.errors import printable, show
from moe_ffn.runs.config import differences
from moe_ffn.runs.value_checks import describe, require_finite, require_plain, require_same_kind
from moe_ffn.training.recovery.checkpoint_file import (
    BEST_NAME,
    IDENTITY,
    CheckpointError,
    read_checkpoint,
)


@dataclass(frozen=True)
class GoodCheckpoint:
    """One that was read and fits."""

    path: Path
    values: Mapping[str, Any]

    @property
    def step(self) -> int:
        return self.values["global_step"]


def newest_good(
    candidates: Iterable[Path], refusal: Callable[[Mapping[str, Any]], str | None]
) -> tuple[GoodCheckpoint | None, list[str]]:
    """The first that can be read and that `refusal` says nothing against.

    Returns:
        that one, or None; and of those before it the names and what is wrong, such as
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
    """That of the best weights, where there is one; a link to nothing is one too, and not good."""
    best = folder / BEST_NAME
    return [best] if os.path.lexists(best) else []


_OF_WEIGHTS = re.compile(r"model|data$|data\.tokenizer|data\.seq_len")
"""The part of an identity without which weights mean something else."""


def refusal_to_resume(
    values: Mapping[str, Any], expected: Mapping[str, Any], model: nn.Module
) -> str | None:
    """Why a run cannot go on from the weights of a checkpoint; None where it can.

    Args:
        expected: the `identity` of the run; what else a checkpoint says of its run is not looked at.
        model: with the names of the weights.

    Raises:
        CheckpointError: the same, of what is malformed.
    """
    _require_parts(values)
    found = {key: values[IDENTITY].get(key) for key in expected}
    if different := _first(differences(found, expected)):
        return different
    _require_weights(values["state_dict"], model)
    return None


def refusal_to_load(
    values: Mapping[str, Any], expected: Mapping[str, Any], model: nn.Module
) -> str | None:
    """Why the weights of a checkpoint do not go into a model; None where they do.

    Args:
        expected: the `identity_of_weights` of the run.
        model: with the names that weights have in `values["state_dict"]`.

    Raises:
        CheckpointError: the same, of what is malformed.
    """
    _require_parts(values)
    different = differences(values[IDENTITY], expected)
    of_weights = {key: pair for key, pair in different.items() if _OF_WEIGHTS.match(key)}
    if refusal := _first(of_weights):
        return refusal
    _require_weights(values["state_dict"], model)
    return None


def _require_parts(values: Mapping[str, Any]) -> None:
    for name in ("state_dict", IDENTITY):
        if not isinstance(values.get(name), Mapping):
            raise CheckpointError(f"lacks '{name}', so it is no checkpoint of a run")
    require_plain(values[IDENTITY], IDENTITY)


def _require_weights(found: Any, model: nn.Module) -> None:
    """Weights that go into a model, and are finite; a buffer may be a mask of infinities.

    Args:
        found: `state_dict` of a checkpoint, by the names of `model`.

    Raises:
        CheckpointError: they do not, or are not.
    """
    expected, parameters = model.state_dict(), dict(model.named_parameters(remove_duplicate=False))
    first_names: dict[int, str] = {}
    for name, value in expected.items():
        if name not in found:
            raise CheckpointError(f"lacks the weight '{name}'")
        if not isinstance(value, Tensor):  # what a block of somebody's own keeps beside its weights
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
            if found[tied].dtype != mine.dtype or not torch.equal(found[tied], mine):
                raise CheckpointError(
                    f"has other numbers in '{name}' than in '{tied}', the same weight"
                )
    if unknown := [name for name in found if name not in expected]:
        raise CheckpointError(f"has the weight {show(unknown[0])}, which this model lacks")


def _first(different: Mapping[str, tuple[Any, Any]]) -> str | None:
    for key, (old, new) in different.items():
        return f"was made with {_short(key)} {_short(old)}, but this run has {_short(new)}"
    return None


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:12]}..."
