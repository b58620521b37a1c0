"""Dense blocks: two matrices, three with a gate, or none."""

from __future__ import annotations

from abc import abstractmethod
from typing import ClassVar, Literal

from pydantic import Field
from torch import Tensor, nn

from moe_ffn.activations import GATE_ACTIVATIONS, Activation, GatedType, activation_function
from moe_ffn.config import MAX_COUNT, describe_options
from moe_ffn.ffn.base import FFNBlock, FFNConfig
from moe_ffn.outputs import FFNOutput, TokenContext, check_dtype, check_input, without_padding
from moe_ffn.sizes import gated_width, linear_flops, linear_params


class IdentityConfig(FFNConfig, frozen=True):
    """No feed-forward block: adds nothing to the residual stream, for ablations."""

    type: Literal["identity"] = "identity"

    def build(self, d_model: int) -> FFNBlock:
        return IdentityFFN(d_model)

    def num_params(self, d_model: int) -> int:
        return 0

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        return 0


class HiddenWidthConfig(FFNConfig, frozen=True):
    """The options of blocks that are matrices into a hidden width and one out of it."""

    d_ff: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Hidden width; by default 4 * d_model, and 8/3 of d_model, rounded, with a gate, which costs as much."""
    bias: bool = False
    """Add a bias to all matrices."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of zeroing a hidden unit, in training."""

    num_matrices: ClassVar[int] = 2

    def width(self, d_model: int) -> int:
        return self.d_ff or 4 * d_model

    def num_params(self, d_model: int) -> int:
        width = self.width(d_model)
        into = (self.num_matrices - 1) * linear_params(d_model, width, self.bias)
        return into + linear_params(width, d_model, self.bias)

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        return self.num_matrices * linear_flops(d_model, self.width(d_model))


class DenseConfig(HiddenWidthConfig, frozen=True):
    """Two matrices and an activation between them (Vaswani et al. 2017, section 3.3)."""

    type: Literal["dense"] = "dense"
    activation: Activation = "gelu"
    """Element-wise function between the two matrices."""

    def build(self, d_model: int) -> FFNBlock:
        return DenseFFN(self, d_model)


class GatedConfig(HiddenWidthConfig, frozen=True):
    """A gated linear unit, down(act(gate x) * up x) (Shazeer 2020, arXiv:2002.05202).

    The type is the activation of the gate: swiglu SiLU, geglu GELU, reglu ReLU, glu sigmoid,
    bilinear none.
    """

    type: GatedType = "swiglu"
    multiple_of: int = Field(default=8, ge=1, le=MAX_COUNT)
    """The default hidden width is rounded to a multiple of this."""

    num_matrices: ClassVar[int] = 3

    def width(self, d_model: int) -> int:
        return self.d_ff or gated_width(d_model, self.multiple_of)

    def build(self, d_model: int) -> FFNBlock:
        return GatedFFN(self, d_model)


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


class HiddenWidthFFN(FFNBlock):
    """down(hidden units of x), with dropout between; subclasses say what the hidden units are."""

    down: nn.Linear

    def __init__(self, config: HiddenWidthConfig, d_model: int, activation: Activation) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model
        self.dropout = nn.Dropout(config.dropout)
        self.activation = activation_function(activation)

    @abstractmethod
    def hidden_units(self, x: Tensor) -> Tensor:
        """(..., d_model) to (..., width)."""

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model)
        check_dtype(x, next(self.parameters(), None))
        x = without_padding(x, context)
        return FFNOutput(self.down(self.dropout(self.hidden_units(x))).to(x.dtype))

    def extra_repr(self) -> str:
        sizes = f"d_model={self.d_model}, d_ff={self.config.width(self.d_model)}"
        return f"{sizes}, {describe_options(self.config, without=['d_ff', 'bias', 'dropout'])}"


class DenseFFN(HiddenWidthFFN):
    """down(act(up x))."""

    def __init__(self, config: DenseConfig, d_model: int) -> None:
        super().__init__(config, d_model, config.activation)
        self.up = nn.Linear(d_model, config.width(d_model), bias=config.bias)
        self.down = nn.Linear(config.width(d_model), d_model, bias=config.bias)

    def hidden_units(self, x: Tensor) -> Tensor:
        return self.activation(self.up(x))


class GatedFFN(HiddenWidthFFN):
    """down(act(gate x) * up x)."""

    def __init__(self, config: GatedConfig, d_model: int) -> None:
        super().__init__(config, d_model, GATE_ACTIVATIONS[config.type])
        width = config.width(d_model)
        self.gate = nn.Linear(d_model, width, bias=config.bias)
        self.up = nn.Linear(d_model, width, bias=config.bias)
        self.down = nn.Linear(width, d_model, bias=config.bias)

    def hidden_units(self, x: Tensor) -> Tensor:
        return self.activation(self.gate(x)) * self.up(x)
