"""Observation of a run: rows of metrics, the routing of each layer, alarms, the progress display, wandb."""

from __future__ import annotations

from typing import Any, ClassVar


class Checkpointed:
    """Mixin with a `state_dict` of the attributes in `in_checkpoint`."""

    in_checkpoint: ClassVar[tuple[str, ...]]
    """Names of attributes that are numbers, tensors or `Checkpointed`; saved without a leading underscore."""

    def state_dict(self) -> dict[str, Any]:
        """Return the attributes. A collective: every rank has to call it."""
        found = {name.lstrip("_"): getattr(self, name) for name in self.in_checkpoint}
        return {
            name: value.state_dict() if isinstance(value, Checkpointed) else value
            for name, value in found.items()
        }

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        for name in self.in_checkpoint:
            value, held = state_dict[name.lstrip("_")], getattr(self, name)
            if isinstance(held, Checkpointed):
                held.load_state_dict(value)
            else:
                setattr(self, name, value)
