"""Surviving: checkpoints, steps that are skipped, and how a run ends before its last step."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar


class Checkpointed:
    """Mixin with a `state_dict` of the attributes in `in_checkpoint`."""

    in_checkpoint: ClassVar[tuple[str, ...]]
    """Names of attributes that are plain values, deques, tensors or `Checkpointed`; saved without a leading
    underscore."""

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes. A collective: every rank has to call it."""
        return {name.lstrip("_"): _saved(getattr(self, name)) for name in self.in_checkpoint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in self.in_checkpoint:
            value, held = state_dict[name.lstrip("_")], getattr(self, name)
            if isinstance(held, Checkpointed):
                held.load_state_dict(value)
            else:
                is_deque = isinstance(held, deque)
                setattr(self, name, deque(value, held.maxlen) if is_deque else value)


def _saved(value: Any) -> Any:
    """Return a value that a checkpoint loads without running code."""
    if isinstance(value, Checkpointed):
        return value.state_dict()
    return list(value) if isinstance(value, deque) else value
