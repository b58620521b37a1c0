"""The newest good checkpoint of a run, and why others are passed over."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from moe_ffn.errors import printable, show
from moe_ffn.runs.checkpoint_checks import (
    describe,
    require_finite,
    require_plain,
    require_same_kind,
)
from moe_ffn.runs.config import differences
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


def refusal_of_weights(
    values: Mapping[str, Any], expected: Mapping[str, Any], model: nn.Module
) -> str | None:
    """Why the weights of a checkpoint do not go into a model; None where they do.

    Args:
        expected: the `identity` of a run that goes on, or the `identity_of_weights`; what else a checkpoint
            says of its run is not looked at.
        model: with the names that weights have in `values["state_dict"]`.

    Raises:
        CheckpointError: the same, of what is malformed.
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


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:12]}..."
