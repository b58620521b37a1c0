"""The configs of the blocks in which every token uses every parameter; torch-free."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from moe_ffn.activations import Activation, GatedType
from moe_ffn.config import MOST
from moe_ffn.ffn.base_config import FFNConfig
from moe_ffn.sizes import gated_params, gated_width, linear_flops, linear_params, mlp_params

if TYPE_CHECKING:
    from moe_ffn.ffn.base import FFNBlock


class IdentityConfig(FFNConfig, frozen=True):
    """No feed-forward block: adds nothing to the residual stream, for ablations."""

    type: Literal["identity"] = "identity"

    def build(self, d_model: int) -> FFNBlock:
        from moe_ffn.ffn.identity import IdentityFFN

        return IdentityFFN(d_model)

    def num_params(self, d_model: int) -> int:
        return 0

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        return 0


class DenseConfig(FFNConfig, frozen=True):
    """Two matrices and an activation between them (Vaswani et al. 2017, section 3.3)."""

    type: Literal["dense"] = "dense"
    d_ff: int | None = Field(default=None, ge=1, le=MOST)
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
        from moe_ffn.ffn.dense import DenseFFN

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
    d_ff: int | None = Field(default=None, ge=1, le=MOST)
    """Hidden width; by default 8/3 * d_model, rounded, so that it costs what a dense block does."""
    multiple_of: int = Field(default=8, ge=1, le=MOST)
    """What the default width is rounded to."""
    bias: bool = False
    """Add a bias to the three matrices."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of zeroing a hidden unit, in training."""

    def width(self, d_model: int) -> int:
        return self.d_ff or gated_width(d_model, self.multiple_of)

    def build(self, d_model: int) -> FFNBlock:
        from moe_ffn.ffn.gated import GatedFFN

        return GatedFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        return gated_params(d_model, self.width(d_model), self.bias)

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        return 3 * linear_flops(d_model, self.width(d_model))


class ConvConfig(FFNConfig, frozen=True):
    """Two 1-D convolutions over positions; with kernel size 1 it is the dense block.

    Vaswani et al. 2017, section 3.3: "another way of describing this is as two convolutions with
    kernel size 1".
    """

    type: Literal["conv"] = "conv"
    kernel_size: int = Field(default=3, ge=1, le=MOST)
    """Positions each convolution sees."""
    causal: bool = True
    """Look back only. False centres the kernel, which a causal model refuses."""
    d_ff: int | None = Field(default=None, ge=1, le=MOST)
    """Hidden width; 4 * d_model by default."""
    activation: Activation = "gelu"
    """Element-wise function between the two convolutions."""
    bias: bool = False
    """Add a bias to both convolutions."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of zeroing a hidden unit, in training."""

    @property
    def not_causal_because(self) -> str | None:
        if self.causal or self.kernel_size == 1:
            return None
        return (
            f"its causal (false) with kernel_size ({self.kernel_size}) looks ahead; set it to true"
        )

    def width(self, d_model: int) -> int:
        return self.d_ff or 4 * d_model

    def build(self, d_model: int) -> FFNBlock:
        from moe_ffn.ffn.conv import ConvFFN

        return ConvFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        width, k = self.width(d_model), self.kernel_size
        up = linear_params(k * d_model, width, self.bias)
        return up + linear_params(k * width, d_model, self.bias)

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        return 2 * linear_flops(self.kernel_size * d_model, self.width(d_model))
