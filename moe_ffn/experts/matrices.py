"""Experts of stacked matrices: plain, down(act(up x)), and gated, down(act(gate x) * up x).

T tokens, D model width, E experts, F hidden width, O output width, I input width
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moe_ffn.config.base import describe_options
from moe_ffn.config.errors import Unsupported, UseCase
from moe_ffn.config.sizes import (
    HiddenWidth,
    gated_width,
    given_width,
    linear_flops,
    linear_params,
    round_width,
)
from moe_ffn.experts.base import Experts, ExpertsConfig
from moe_ffn.kernels.activations import (
    Activation,
    ClampOptions,
    GateOptions,
    GLUOptions,
    SoftCapOptions,
)
from moe_ffn.kernels.base import ExpertWeights, init_linear_
from moe_ffn.kernels.select import BACKENDS, BackendName, run_experts
from moe_ffn.outputs import Plan


class MatrixExpertsConfig(ExpertsConfig, frozen=True):
    """Options that plain and gated experts share."""

    num_matrices: ClassVar[int] = 2
    divides_over_ranks: ClassVar[bool] = True

    d_ff: HiddenWidth = None
    """Hidden width of one expert; by default the width of the dense block / experts per token.
    `{match: active_params, of: {type: dense, d_ff: 512}}` gives the whole block the cost of that block."""
    bias: bool = False
    """Add a bias to every matrix."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of zeroing an activated hidden unit, in training."""
    backend: BackendName = "auto"
    """Implementation of the experts' matrix products; all compute the same result."""

    @abstractmethod
    def width(self, d_model: int, experts_per_token: float) -> int:
        """Return F, the hidden width of one expert."""

    def params_per_expert(self, d_model: int, experts_per_token: float) -> int:
        width = self.width(d_model, experts_per_token)
        input_params = (self.num_matrices - 1) * linear_params(d_model, width, self.bias)
        return input_params + linear_params(width, d_model, self.bias)

    def flops_per_pair(self, d_model: int, experts_per_token: float) -> int:
        return self.num_matrices * linear_flops(d_model, self.width(d_model, experts_per_token))

    def with_fixed_width(self, d_model: int, experts_per_token: float) -> MatrixExpertsConfig:
        return self.model_copy(update={"d_ff": self.width(d_model, experts_per_token)})

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        needed = None if self.backend == "auto" else BACKENDS[self.backend].device
        if None not in (needed, use_case.device) and needed != use_case.device:
            return Unsupported(
                f"backend ({self.backend}) runs on {needed}, but this run is on {use_case.device}",
                "use auto",
            )
        return super().unsupported(use_case)


class MatrixExperts(Experts):
    """Experts that run on a backend of `moe_ffn.kernels`."""

    config: Any  # each subclass has its own config class
    activation: Activation
    down: nn.Parameter
    """(E, D, F)"""
    before_products: Callable[[ExpertWeights], ExpertWeights] = staticmethod(
        lambda weights: weights
    )
    """Function of the weights of this rank before each forward pass; a wrapper may set it."""

    @abstractmethod
    def weights(self) -> ExpertWeights: ...

    def forward(self, x_TD: Tensor, plan: Plan) -> Tensor:
        weights = self.weights().with_adapters_of(self).on_this_rank()
        return run_experts(x_TD, plan, self.before_products(weights), self.config.backend)

    @property
    def dropout(self) -> float:
        """Dropout probability in the current mode: 0 in evaluation."""
        return self.config.dropout if self.training else 0.0

    def extra_repr(self) -> str:
        num_experts, d_model, d_ff = self.down.shape
        sizes = f"num_experts={num_experts}, d_model={d_model}, d_ff={d_ff}"
        options = describe_options(self.config, without=["d_ff", "activation"])
        return f"{sizes}, activation={self.activation}, {options}"


def stacked_linear(
    num_experts: int, d_in: int, d_out: int, bias: bool
) -> tuple[nn.Parameter, nn.Parameter | None]:
    """Return E matrices (E, out, in), and biases (E, out) if `bias`, initialised like `nn.Linear`."""
    weight_EOI = nn.Parameter(torch.empty(num_experts, d_out, d_in))
    bias_EO = nn.Parameter(torch.empty(num_experts, d_out)) if bias else None
    init_linear_(weight_EOI, bias_EO)
    return weight_EOI, bias_EO


class MLPExpertsConfig(MatrixExpertsConfig, frozen=True):
    """Plain experts: down(act(up x)). By default a token's experts have a total width of 4 * d_model."""

    type: Literal["mlp"] = "mlp"
    activation: Activation = "gelu"
    """Element-wise function between the two matrices."""

    def width(self, d_model: int, experts_per_token: float) -> int:
        return given_width(self.d_ff) or round_width(4 * d_model / experts_per_token)

    def build(self, d_model: int, num_experts: int, experts_per_token: float) -> Experts:
        return MLPExperts(self, d_model, num_experts, experts_per_token)


class MLPExperts(MatrixExperts):
    """E networks down(act(up x))."""

    def __init__(
        self, config: MLPExpertsConfig, d_model: int, num_experts: int, experts_per_token: float
    ) -> None:
        super().__init__()
        self.config = config
        self.activation = config.activation
        width = config.width(d_model, experts_per_token)
        self.up, self.up_bias = stacked_linear(num_experts, d_model, width, config.bias)
        self.down, self.down_bias = stacked_linear(num_experts, width, d_model, config.bias)

    def weights(self) -> ExpertWeights:
        return ExpertWeights(
            activation=self.activation,
            up_EHD=self.up,
            down_EDF=self.down,
            up_bias_EH=self.up_bias,
            down_bias_ED=self.down_bias,
            dropout=self.dropout,
        )


class GatedExpertsBaseConfig(GateOptions, MatrixExpertsConfig, frozen=True):
    """Options of all gated experts; by default a token's experts have a total width of 8/3 * d_model."""

    num_matrices: ClassVar[int] = 3

    def width(self, d_model: int, experts_per_token: float) -> int:
        return given_width(self.d_ff) or gated_width(d_model / experts_per_token)

    def build(self, d_model: int, num_experts: int, experts_per_token: float) -> Experts:
        return GatedExperts(self, d_model, num_experts, experts_per_token)


class GatedExpertsConfig(GLUOptions, GatedExpertsBaseConfig, frozen=True):
    """Gated experts: down(act(gate x) * up x). The type names the gate's activation, as in `GatedConfig`.

    By default, a token's experts have a total width of 8/3 * d_model.
    """


class ClampedSwiGLUExpertsConfig(ClampOptions, GatedExpertsBaseConfig, frozen=True):
    """Experts with GPT-OSS's gate (arXiv:2508.10925): clamped SwiGLU with 1 added to the linear part.

    Other values of the options give the gates of later models, such as DeepSeek-V4.
    """


class SoftCappedSwiGLUExpertsConfig(SoftCapOptions, GatedExpertsBaseConfig, frozen=True):
    """SwiGLU experts whose gate and linear part are bounded by tanh (Inkling 2)."""


class GatedExperts(MatrixExperts):
    """E networks down(act(gate x) * up x).

    `gate_up` (E, 2 F, D) has the gate's rows first, then the rows of up; `gate` and `up` are views of it.
    """

    def __init__(
        self,
        config: GatedExpertsBaseConfig,
        d_model: int,
        num_experts: int,
        experts_per_token: float,
    ) -> None:
        super().__init__()
        self.config = config
        self.activation, self.gate_function = config.gate_activation, config.gate_function
        width = config.width(d_model, experts_per_token)
        self.gate_up, self.gate_up_bias = stacked_linear(
            num_experts, d_model, 2 * width, config.bias
        )
        self.down, self.down_bias = stacked_linear(num_experts, width, d_model, config.bias)

    def weights(self) -> ExpertWeights:
        return ExpertWeights(
            activation=self.activation,
            up_EHD=self.gate_up,
            down_EDF=self.down,
            gated=True,
            up_bias_EH=self.gate_up_bias,
            down_bias_ED=self.down_bias,
            dropout=self.dropout,
            gate_function=self.gate_function,
        )

    @property
    def gate(self) -> Tensor:
        """(E, F, D)"""
        return self.gate_up.chunk(2, dim=1)[0]

    @property
    def up(self) -> Tensor:
        """(E, F, D)"""
        return self.gate_up.chunk(2, dim=1)[1]

    @property
    def gate_bias(self) -> Tensor | None:
        """(E, F)"""
        return None if self.gate_up_bias is None else self.gate_up_bias.chunk(2, dim=1)[0]

    @property
    def up_bias(self) -> Tensor | None:
        """(E, F)"""
        return None if self.gate_up_bias is None else self.gate_up_bias.chunk(2, dim=1)[1]
