"""Recovery: checkpoints, skipped steps, and runs that end before their last step."""

from __future__ import annotations

from collections import deque
from typing import Any, ClassVar


class TrainingError(RuntimeError):
    """Training failed or ended early; the run's folder has its checkpoints, and `load_run` reads it."""


class Checkpointed:
    """Mixin with a `state_dict` of the attributes in `in_checkpoint`."""

    in_checkpoint: ClassVar[tuple[str, ...]]
    """Names of the attributes to save; keys of the `state_dict` have no leading underscore. Each attribute
    holds a plain value, a deque, tensors or a `Checkpointed`."""

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes. A collective: every rank has to call this."""
        return {name.lstrip("_"): _saved(getattr(self, name)) for name in self.in_checkpoint}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in self.in_checkpoint:
            value, current = state_dict[name.lstrip("_")], getattr(self, name)
            if isinstance(current, Checkpointed):
                current.load_state_dict(value)
            else:
                is_deque = isinstance(current, deque)
                setattr(self, name, deque(value, current.maxlen) if is_deque else value)


def _saved(value: Any) -> Any:
    """Convert a value to types that `torch.load(weights_only=True)` accepts."""
    if isinstance(value, Checkpointed):
        return value.state_dict()
    return list(value) if isinstance(value, deque) else value
