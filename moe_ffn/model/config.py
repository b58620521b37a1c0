"""The config of the decoder; torch-free (see `moe_ffn.config`)."""

from __future__ import annotations

from abc import abstractmethod
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from moe_ffn.config import MOST, Config, TaggedConfig
from moe_ffn.ffn.config import FFNConfig, MoEConfig
from moe_ffn.layer_names import parse_layer
from moe_ffn.sizes import linear_flops, linear_params

if TYPE_CHECKING:
    from torch import nn

    from moe_ffn.model.decoder import Decoder
    from moe_ffn.model.positions import Positions


LEAST_EPS = 1e-30
"""Below it, float32 would take it for nothing, and the norm of a zero vector would be NaN."""


class PositionsConfig(TaggedConfig, frozen=True):
    """How the model knows where a token stands."""

    @abstractmethod
    def build(self, d_model: int, head_dim: int, max_seq_len: int) -> Positions: ...

    def num_params(self, d_model: int, max_seq_len: int) -> int:
        return 0


class RotaryConfig(PositionsConfig, frozen=True):
    """Rotary embeddings of queries and keys (Su et al. 2021, RoFormer, arXiv:2104.09864)."""

    type: Literal["rope"] = "rope"
    base: float = Field(default=10_000.0, gt=1)
    """The longest wavelength is about 2 pi * base positions."""

    def build(self, d_model: int, head_dim: int, max_seq_len: int) -> Positions:
        from moe_ffn.model.positions import Rotary

        return Rotary(self.base, head_dim, max_seq_len)


class SinusoidalConfig(PositionsConfig, frozen=True):
    """Fixed sines and cosines, added to the embeddings (Vaswani et al. 2017, section 3.5)."""

    type: Literal["sinusoidal"] = "sinusoidal"

    def build(self, d_model: int, head_dim: int, max_seq_len: int) -> Positions:
        from moe_ffn.model.positions import Sinusoidal

        return Sinusoidal(d_model, max_seq_len)


class LearnedConfig(PositionsConfig, frozen=True):
    """One learned vector per position, added to the embeddings."""

    type: Literal["learned"] = "learned"

    def num_params(self, d_model: int, max_seq_len: int) -> int:
        return max_seq_len * d_model

    def build(self, d_model: int, head_dim: int, max_seq_len: int) -> Positions:
        from moe_ffn.model.positions import Learned

        return Learned(d_model, max_seq_len)


class NormConfig(TaggedConfig, frozen=True):
    """How activations are normalised."""

    @abstractmethod
    def build(self, d_model: int) -> nn.Module: ...

    @abstractmethod
    def num_params(self, d_model: int) -> int: ...


class RMSNormConfig(NormConfig, frozen=True):
    """x / rms(x) * scale (Zhang & Sennrich 2019, arXiv:1910.07467)."""

    type: Literal["rms_norm"] = "rms_norm"
    eps: float = Field(default=1e-6, ge=LEAST_EPS)
    """Added to the mean square."""

    def num_params(self, d_model: int) -> int:
        return d_model

    def build(self, d_model: int) -> nn.Module:
        from torch import nn

        return nn.RMSNorm(d_model, eps=self.eps)


class LayerNormConfig(NormConfig, frozen=True):
    """Centred and scaled, with a scale and a shift (Ba et al. 2016, arXiv:1607.06450)."""

    type: Literal["layer_norm"] = "layer_norm"
    eps: float = Field(default=1e-5, ge=LEAST_EPS)
    """Added to the variance."""

    def num_params(self, d_model: int) -> int:
        return 2 * d_model

    def build(self, d_model: int) -> nn.Module:
        from torch import nn

        return nn.LayerNorm(d_model, eps=self.eps)


class AttentionConfig(Config, frozen=True):
    """Self-attention; fewer key-value heads than query heads is grouped-query attention."""

    num_heads: int = Field(default=4, ge=1, le=MOST)
    """Query heads; must divide d_model."""
    num_kv_heads: int | None = Field(default=None, ge=1, le=MOST)
    """Key and value heads, shared by groups of query heads; num_heads by default."""
    bias: bool = False
    """Add a bias to the four projections."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping an attention weight, in training."""

    @property
    def kv_heads(self) -> int:
        return self.num_kv_heads or self.num_heads

    @model_validator(mode="after")
    def _check_groups(self) -> AttentionConfig:
        if self.num_heads % self.kv_heads:
            raise ValueError(
                f"num_kv_heads ({self.kv_heads}) must divide num_heads ({self.num_heads})"
            )
        return self

    def num_params(self, d_model: int) -> int:
        d_kv = d_model // self.num_heads * self.kv_heads
        query_and_output = 2 * linear_params(d_model, d_model, self.bias)
        return query_and_output + 2 * linear_params(d_model, d_kv, self.bias)

    def flops_per_token(self, d_model: int, seq_len: int, causal: bool = True) -> int:
        """Forward FLOPs per token; in a causal sequence it attends to (seq_len + 1) / 2 on average."""
        d_kv = d_model // self.num_heads * self.kv_heads
        projections = 2 * linear_flops(d_model, d_model) + 2 * linear_flops(d_model, d_kv)
        attended = (seq_len + 1) / 2 if causal else seq_len
        return projections + round(4 * d_model * attended)


def _string_keys(value: Any) -> Any:
    """YAML reads the layer `0:` as a number."""
    return {str(key): item for key, item in value.items()} if isinstance(value, dict) else value


class DecoderConfig(Config, frozen=True):
    """A Transformer over tokens: a causal decoder, or a bidirectional encoder."""

    d_model: int = Field(default=128, ge=1, le=MOST)
    """Width of the residual stream."""
    num_layers: int = Field(default=4, ge=1, le=10_000)
    """Blocks of attention and feed-forward."""
    causal: bool = True
    """Predict the next token from those before it. False: see both sides, guess masked tokens."""
    ffn: FFNConfig = MoEConfig()
    """The feed-forward block of every layer."""
    ffn_at: Annotated[dict[str, FFNConfig], BeforeValidator(_string_keys)] = Field(default={})
    """Layers that differ, by Python slice: {"0": {type: dense}, "1::2": {type: moe}}; the last wins."""
    attention: AttentionConfig = AttentionConfig()
    """Self-attention."""
    positions: PositionsConfig = RotaryConfig()
    """How the model knows where a token stands."""
    norm: NormConfig = RMSNormConfig()
    """How activations are normalised."""
    norm_placement: Literal["pre", "post"] = "pre"
    """Before each sublayer, x + f(norm(x)), or after the sum, norm(x + f(x)), as in 2017."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping a unit of the embeddings and of each sublayer's output, in training."""
    tie_embeddings: bool = True
    """Use the token embeddings as the output matrix."""
    scale_embeddings: bool = False
    """Multiply token embeddings by sqrt(d_model), as in 2017."""
    activation_checkpointing: bool = False
    """Keep only each layer's input and compute the layer again in the backward pass: less memory."""

    @model_validator(mode="after")
    def _check_parts_against_each_other(self) -> DecoderConfig:
        if self.d_model % self.attention.num_heads:
            raise ValueError(
                f"attention.num_heads ({self.attention.num_heads}) must divide d_model ({self.d_model})"
            )
        if self.positions.type == "rope" and self.head_dim % 2:
            raise ValueError(
                f"positions.type 'rope' needs an even head width, but d_model ({self.d_model}) / "
                f"attention.num_heads ({self.attention.num_heads}) is {self.head_dim}"
            )
        if self.positions.type == "sinusoidal" and self.d_model % 2:
            raise ValueError(
                f"positions.type 'sinusoidal' needs an even d_model, got {self.d_model}"
            )
        for layer, ffn in enumerate(self.layer_ffns()):
            if self.causal and not ffn.is_causal:
                raise ValueError(
                    f"a causal model refuses the '{ffn.type}' block of layer {layer}: "
                    f"{ffn.not_causal_because}, or set model.causal: false"
                )
        return self

    @property
    def head_dim(self) -> int:
        return self.d_model // self.attention.num_heads

    def layer_ffns(self) -> list[FFNConfig]:
        """The feed-forward config of each layer, first to last."""
        layers = [self.ffn] * self.num_layers
        for where, ffn in self.ffn_at.items():
            chosen = range(self.num_layers)[_parse_slice(where)]
            if not chosen:
                raise ValueError(
                    f"ffn_at '{where}' names none of the {self.num_layers} layers "
                    f"(0 to {self.num_layers - 1})"
                )
            for layer in chosen:
                layers[layer] = ffn
        return layers

    def routed_ffn(self, layer: str) -> FFNConfig:
        """The block behind a routing, by the routing's name."""
        number, is_inner = parse_layer(layer)
        ffn = self.layer_ffns()[number]
        return getattr(ffn, "ffn", ffn) if is_inner else ffn

    def build(self, vocab_size: int, max_seq_len: int) -> Decoder:
        """The module, freshly initialised, for sequences of up to `max_seq_len` tokens."""
        from moe_ffn.model.decoder import Decoder

        return Decoder(self, vocab_size, max_seq_len)

    def num_params(self, vocab_size: int, max_seq_len: int) -> int:
        ffn = sum(ffn.num_params(self.d_model) for ffn in self.layer_ffns())
        return ffn + self._params_beside_ffn(vocab_size, max_seq_len)

    def num_active_params(self, vocab_size: int, max_seq_len: int) -> int:
        """Parameters that one token passes through, embeddings included."""
        ffn = sum(ffn.num_active_params(self.d_model) for ffn in self.layer_ffns())
        return ffn + self._params_beside_ffn(vocab_size, max_seq_len)

    def flops_per_token(self, vocab_size: int, seq_len: int) -> int:
        """Forward FLOPs of the matrix products for one token; training costs three times that."""
        ffn = sum(ffn.flops_per_token(self.d_model, seq_len) for ffn in self.layer_ffns())
        attention = self.attention.flops_per_token(self.d_model, seq_len, self.causal)
        attention *= self.num_layers
        return ffn + attention + linear_flops(self.d_model, vocab_size)

    def num_norm_params(self) -> int:
        """Two norms a layer, and a last one where the stream itself is never normalised."""
        num_norms = 2 * self.num_layers + (self.norm_placement == "pre")
        return num_norms * self.norm.num_params(self.d_model)

    def _params_beside_ffn(self, vocab_size: int, max_seq_len: int) -> int:
        return (
            vocab_size * self.d_model * (1 if self.tie_embeddings else 2)
            + (0 if self.causal else self.d_model)  # the embedding of the mask
            + self.positions.num_params(self.d_model, max_seq_len)
            + self.num_layers * self.attention.num_params(self.d_model)
            + self.num_norm_params()
        )


def _parse_slice(text: str) -> slice:
    """`"1::2"` as a slice; a lone `"3"` is that one layer."""
    try:
        numbers = [int(part) if part.strip() else None for part in text.split(":")]
    except ValueError:
        numbers = []
    if len(numbers) == 1 and numbers[0] is not None:
        first = numbers[0]
        return slice(first, first + 1 or None)
    if len(numbers) not in (2, 3) or numbers[2:] == [0]:
        raise ValueError(
            f"ffn_at '{text}' must be a layer or a Python slice, such as '0' or '1::2'"
        )
    return slice(*numbers)
