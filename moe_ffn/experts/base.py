"""The interface of every kind of expert: (tokens, plan) -> weighted sums.

T tokens, D model width
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import torch
from torch import Tensor, nn

from moe_ffn.config.base import TaggedConfig
from moe_ffn.config.errors import Refusal, Situation
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.kernels.native.build import unavailable_reason
from moe_ffn.outputs import Plan


class ExpertsConfig(TaggedConfig, frozen=True):
    """The kind of network of the E experts of a layer.

    By default the `experts_per_token` experts of a token share the width of the dense block, so that
    a layer costs as much as the dense block.

    Custom experts subclass this in any file and define `build`, `params_per_expert` and `flops_per_pair`.
    YAML names them as `experts: {type: my_module:MyConfig}`; see `docs/custom_parts.md`.
    """

    divides_over_ranks: ClassVar[bool] = False
    """True if the module computes with its rank's part of distributed weights. The first axis of each weight
    has to count the experts, so that experts share no weight."""
    reads_input: ClassVar[bool] = True
    """False where an expert returns the same for every token."""

    @abstractmethod
    def build(self, d_model: int, num_experts: int, experts_per_token: float) -> Experts: ...

    @abstractmethod
    def params_per_expert(self, d_model: int, experts_per_token: float) -> int: ...

    @abstractmethod
    def flops_per_pair(self, d_model: int, experts_per_token: float) -> int:
        """Forward FLOPs of the matrix products of one expert on one token."""

    @property
    def innermost(self) -> ExpertsConfig:
        """The experts that have weights of their own, inside kinds that hold experts."""
        return self

    def dispatch_width(self, d_model: int) -> int:
        """Width of the tokens that are dispatched to the experts."""
        return d_model

    def shared_params(self, d_model: int, experts_per_token: float) -> int:
        """Parameters that all experts of a layer share; each token is taken to pass through them."""
        return 0

    def shared_flops_per_token(self, d_model: int, experts_per_token: float) -> int:
        """Forward FLOPs of the matrix products done once for a token, however many experts it goes to."""
        return 0

    def flops_around_dispatch(self, d_model: int) -> int:
        """Forward FLOPs per token of `Experts.before_dispatch` and `Experts.after_combine`."""
        return 0

    def with_fixed_width(self, d_model: int, experts_per_token: float) -> ExpertsConfig:
        """The same experts, as wide as now however many of them a token then goes to."""
        return self

    def refusal(self, situation: Situation) -> Refusal | None:
        """Return the reason why the experts cannot serve a situation; None if they can."""
        if self.divides_over_ranks or situation.num_ranks == 1:
            return None
        return Refusal(
            f"type '{self.type}' does not say that its experts can be on several ranks "
            "(`divides_over_ranks`)",
            "set parallel.expert to 1",
        )


class Experts(nn.Module, ABC):
    """E parallel networks of the same shape, their weights stacked along the first axis."""

    by_row: bool = False
    """True where an expert is a row of some tables: then plans are lists of pairs (`dispatch.plan_of_list`),
    and nothing is done for an expert that no token goes to."""

    @property
    def innermost(self) -> Experts:
        """The experts whose weights ranks divide, inside kinds that hold experts."""
        return self

    def before_dispatch(self, x_TD: Tensor) -> Tensor:
        """Change the tokens on their own rank, before they travel to their experts."""
        return x_TD

    @abstractmethod
    def forward(self, x_TD: Tensor, plan: Plan) -> Tensor:
        """Gather, compute, weight and add up as `plan` says; the shape and dtype of `x_TD`."""

    def after_combine(self, y_TD: Tensor) -> Tensor:
        """Change the weighted sums on the rank of their tokens."""
        return y_TD

    def run(self, x_TD: Tensor, plan: Plan) -> Tensor:
        """(T, D), all three steps, where every expert is on this rank."""
        return self.after_combine(self(self.before_dispatch(x_TD), plan))

    def weights(self) -> ExpertWeights | None:
        """The parameters themselves, as those of E networks with hidden units; None of any other kind."""
        return None


def compile_kernels(model: nn.Module, device: torch.device) -> None:
    """Compile the CPU kernels that a model with experts uses, where this machine has not yet.

    Call it before a clock starts: otherwise the first step compiles them.
    """
    if device.type == "cpu" and any(isinstance(part, Experts) for part in model.modules()):
        unavailable_reason()
