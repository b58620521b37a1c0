"""Dense blocks: two matrices, three with a gate, or none."""

from __future__ import annotations

from typing import Literal

from pydantic import Field
from torch import Tensor, nn

from moe_ffn.activations import GATE_ACTIVATIONS, Activation, GatedType, activation_function
from moe_ffn.config import MAX_COUNT
from moe_ffn.ffn.base import FFNBlock, FFNConfig
from moe_ffn.outputs import FFNOutput, TokenContext, check_dtype, check_input, without_padding
from moe_ffn.sizes import gated_params, gated_width, linear_flops, mlp_params


class IdentityConfig(FFNConfig, frozen=True):
    """No feed-forward block: adds nothing to the residual stream, for ablations."""

    type: Literal["identity"] = "identity"

    def build(self, d_model: int) -> FFNBlock:
        return IdentityFFN(d_model)

    def num_params(self, d_model: int) -> int:
        return 0

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        return 0


class DenseConfig(FFNConfig, frozen=True):
    """Two matrices and an activation between them (Vaswani et al. 2017, section 3.3)."""

    type: Literal["dense"] = "dense"
    d_ff: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Hidden width; 4 * d_model by default."""
    activation: Activation = "gelu"
    """Element-wise function between the two matrices."""
    bias: bool = False
    """Add a bias to both matrices."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of zeroing a hidden unit, in training."""

    def width(self, d_model: int) -> int:
        return self.d_ff or 4 * d_model

    def build(self, d_model: int) -> FFNBlock:
        return DenseFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        return mlp_params(d_model, self.width(d_model), self.bias)

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        return 2 * linear_flops(d_model, self.width(d_model))


class GatedConfig(FFNConfig, frozen=True):
    """A gated linear unit, down(act(gate x) * up x) (Shazeer 2020, arXiv:2002.05202).

    The type is the activation of the gate: swiglu SiLU, geglu GELU, reglu ReLU, glu sigmoid,
    bilinear none.
    """

    type: GatedType = "swiglu"
    d_ff: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Hidden width; by default 8/3 * d_model, rounded, so that it costs what a dense block does."""
    multiple_of: int = Field(default=8, ge=1, le=MAX_COUNT)
    """What the default width is rounded to."""
    bias: bool = False
    """Add a bias to the three matrices."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of zeroing a hidden unit, in training."""

    def width(self, d_model: int) -> int:
        return self.d_ff or gated_width(d_model, self.multiple_of)

    def build(self, d_model: int) -> FFNBlock:
        return GatedFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        return gated_params(d_model, self.width(d_model), self.bias)

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        return 3 * linear_flops(d_model, self.width(d_model))


class IdentityFFN(FFNBlock):
    """Contributes zero, so that around a residual connection the sublayer is the identity."""

    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.d_model = d_model

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model)
        # A plain zero would leave the norm before it without a gradient, and DDP would hang.
        return FFNOutput(x * 0)

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}"


class DenseFFN(FFNBlock):
    """down(act(up x))."""

    def __init__(self, config: DenseConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model
        self.up = nn.Linear(d_model, config.width(d_model), bias=config.bias)
        self.down = nn.Linear(config.width(d_model), d_model, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = activation_function(config.activation)

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model)
        check_dtype(x, next(self.parameters(), None))
        x = without_padding(x, context)
        hidden = self.down(self.dropout(self.activation(self.up(x))))
        return FFNOutput(hidden.to(x.dtype))

    def extra_repr(self) -> str:
        sizes = f"d_model={self.d_model}, d_ff={self.config.width(self.d_model)}"
        return f"{sizes}, activation={self.config.activation}"


class GatedFFN(FFNBlock):
    """down(act(gate x) * up x)."""

    def __init__(self, config: GatedConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model
        width = config.width(d_model)
        self.gate = nn.Linear(d_model, width, bias=config.bias)
        self.up = nn.Linear(d_model, width, bias=config.bias)
        self.down = nn.Linear(width, d_model, bias=config.bias)
        self.dropout = nn.Dropout(config.dropout)
        self.activation = activation_function(GATE_ACTIVATIONS[config.type])

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model)
        check_dtype(x, next(self.parameters(), None))
        x = without_padding(x, context)
        hidden = self.down(self.dropout(self.activation(self.gate(x)) * self.up(x)))
        return FFNOutput(hidden.to(x.dtype))

    def extra_repr(self) -> str:
        sizes = f"d_model={self.d_model}, d_ff={self.config.width(self.d_model)}"
        activation = GATE_ACTIVATIONS[self.config.type]
        return f"{sizes}, activation={activation}, type={self.config.type}"
