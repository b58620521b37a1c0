"""Interface of every kind of expert: (tokens, plan) -> weighted sums.

T tokens, D model width
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, ClassVar

from torch import Tensor, nn

from moe_ffn.config.base import TaggedConfig
from moe_ffn.config.errors import Unsupported, UseCase
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.outputs import Plan


class ExpertsConfig(TaggedConfig, frozen=True):
    """Config of the E experts of a layer.

    By default, a token's `experts_per_token` experts divide the width of the dense block equally, so that a
    layer costs as much as the dense block.

    For custom experts, subclass this in your own file and define `build`, `params_per_expert` and
    `flops_per_pair`. YAML names the class as `experts: {type: my_module:MyConfig}`; see
    `docs/howto/custom_experts.md`.
    """

    divides_over_ranks: ClassVar[bool] = False
    """True if the module can compute with its rank's part of distributed weights. The first axis of every
    weight must count experts, so experts share no weights."""
    reads_input: ClassVar[bool] = True
    """False if an expert's output is the same for every token."""

    @abstractmethod
    def build(self, d_model: int, num_experts: int, experts_per_token: float) -> Experts:
        """Return `num_experts` new experts; `experts_per_token` sets the default hidden width."""

    @abstractmethod
    def params_per_expert(self, d_model: int, experts_per_token: float) -> int:
        """Return the number of parameters of one expert, without shared ones."""

    @abstractmethod
    def flops_per_pair(self, d_model: int, experts_per_token: float) -> int:
        """Return the forward FLOPs of the matrix products of one expert on one token."""

    @property
    def innermost(self) -> ExpertsConfig:
        """The experts inside all wrappers."""
        return self

    def dispatch_width(self, d_model: int) -> int:
        """Return the width of the dispatched tokens."""
        return d_model

    def shared_params(self, d_model: int, experts_per_token: float) -> int:
        """Return the number of parameters that the experts of a layer share; every token uses them."""
        return 0

    def shared_flops_per_token(self, d_model: int, experts_per_token: float) -> int:
        """Return the forward FLOPs of the matrix products that run once per token, not once per expert."""
        return 0

    def wrapper_flops_per_token(self, d_model: int) -> int:
        """Return the forward FLOPs per token of `Experts.before_dispatch` and `Experts.after_combine`."""
        return 0

    def with_fixed_width(self, d_model: int, experts_per_token: float) -> ExpertsConfig:
        """Return a config that keeps the current width if `experts_per_token` changes."""
        return self

    def unfit_width(self, d_model: int, experts_per_token: float) -> Unsupported | None:
        """Return the reason why the experts cannot have their widths in such a layer; None if they can."""
        return None

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        """Return the reason why the experts cannot serve a use case; None if they can."""
        if self.divides_over_ranks or use_case.num_ranks == 1:
            return None
        return Unsupported(
            f"type '{self.type}' does not support expert parallelism (divides_over_ranks is False in its "
            "config)",
            "set parallel.expert to 1",
        )


class Experts(nn.Module, ABC):
    """E parallel networks of equal shape; their weights are stacked along the first axis."""

    are_embeddings: bool = False
    """True if an expert is a row of embedding tables. Plans are then unsorted (`dispatch.unsorted_plan`), and
    experts without tokens cost nothing."""

    @property
    def innermost(self) -> Experts:
        """The experts inside all wrappers, whose weights are divided among ranks."""
        return self

    def before_dispatch(self, x_TD: Tensor) -> Tensor:
        """Transform the tokens on their own rank, before they are dispatched."""
        return x_TD

    @abstractmethod
    def forward(self, x_TD: Tensor, plan: Plan) -> Tensor:
        """Return the weighted sums over the pairs of `plan`, with the shape and dtype of `x_TD`."""

    def after_combine(self, y_TD: Tensor) -> Tensor:
        """Transform the weighted sums on the rank of their tokens."""
        return y_TD

    def run(self, x_TD: Tensor, plan: Plan) -> Tensor:
        """Run all three steps when every expert is on this rank; return (T, D)."""
        return self.after_combine(self(self.before_dispatch(x_TD), plan))

    def weights(self) -> ExpertWeights | None:
        """Return the parameters (no copies) of E networks with hidden units; None for other kinds."""
        return None


def without_adapters(module: nn.Module) -> Any:
    """Return the module that adapters of peft wrap, or the copy that they train in its place."""
    inner: Any = module
    while not isinstance(inner, Experts) and hasattr(inner, "base_layer"):
        inner = inner.base_layer
    if type(inner).__name__ == "ModulesToSaveWrapper":
        wrapper: Any = inner
        copies = {} if wrapper.disable_adapters else wrapper.modules_to_save
        return next(
            (copies[n] for n in wrapper.active_adapters if n in copies), wrapper.original_module
        )
    return inner
