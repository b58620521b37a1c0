"""Self-attention: grouped-query attention, with sinks or without, and multi-head latent attention.

B batch, H heads, S sequence, D model width, d head width
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from pydantic import BeforeValidator, Field, model_validator
from torch import Tensor, nn

from moe_ffn.config.base import MAX_COUNT, Config
from moe_ffn.config.sizes import linear_flops, linear_params
from moe_ffn.kernels.base import is_autocast_on, is_batched, needs_gradient
from moe_ffn.kernels.routing import has_compiled_tiles
from moe_ffn.model.cache import LayerCache
from moe_ffn.model.norm import NormConfig
from moe_ffn.model.positions import PositionEncoding


def _layers_as_text(value: Any) -> Any:
    """Convert `1` and `[0, 2]`, which YAML reads as numbers."""
    layers = value if isinstance(value, list | tuple) else [value]
    return ",".join(map(str, layers)) if all(type(n) is int for n in layers) else value


class LatentConfig(Config, frozen=True):
    """Multi-head latent attention: keys and values are projected from one latent vector per token
    (DeepSeek-V2, arXiv:2405.04434, section 2.1).
    """

    kv_rank: int = Field(default=512, ge=1, le=MAX_COUNT)
    """Width of the latent vector of keys and values, which the model's `norm` normalises."""
    query_rank: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Width of the normalised latent vector of queries; null: queries have no latent vector."""
    rotated_dim: int = Field(default=64, ge=1, le=MAX_COUNT)
    """Width of the rotated (RoPE) part of each query and key, in addition to head_dim; all heads share this
    part of the key."""
    value_dim: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Width of the values of a head; head_dim by default."""


class AttentionConfig(Config, frozen=True):
    """Self-attention; grouped-query attention if there are fewer key-value heads than query heads."""

    num_heads: int = Field(default=4, ge=1, le=MAX_COUNT)
    """Query heads; must divide d_model, unless head_dim is given."""
    num_kv_heads: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Key-value heads, each shared by a group of query heads; num_heads by default."""
    head_dim: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Width of a head; d_model / num_heads by default."""
    norm_qk: Literal["head", "all"] | None = None
    """Normalise queries and keys with the model's `norm` before rotation. head: each head by itself (Qwen3,
    arXiv:2505.09388); all: all heads together (OLMoE, arXiv:2409.02060)."""
    bias: bool | Literal["qkv"] = False
    """Add a bias to the four projections; qkv: to all but the output (Qwen2, arXiv:2407.10671)."""
    sinks: bool = False
    """Learn one logit per head that takes part in the softmax and has no value, so that a head may attend to
    nothing (GPT-OSS, arXiv:2508.10925)."""
    latent: LatentConfig | None = None
    """Options of multi-head latent attention, such as `{kv_rank: 512}`; null: ordinary keys and values."""
    window: int | None = Field(default=None, ge=1, le=MAX_COUNT)
    """Number of tokens that a token attends to: itself and the ones before it, as in Mistral 7B
    (arXiv:2310.06825); null: all. With `causal: false`, as many on each side."""
    window_at: Annotated[str, BeforeValidator(_layers_as_text)] = ":"
    """Layers with the window, as Python slices with commas between them, such as `::2` or `0,2,5:`."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """Probability of dropping an attention weight in training."""

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

    @model_validator(mode="after")
    def _check_window(self) -> AttentionConfig:
        if self.window is None and self.window_at != ":":
            raise ValueError(
                f"window_at ({self.window_at}) needs window, the number of tokens; set window, or leave "
                "window_at out"
            )
        return self

    @model_validator(mode="after")
    def _check_latent(self) -> AttentionConfig:
        for name in ("num_kv_heads", "norm_qk", "bias", "sinks"):
            if self.latent is not None and (value := getattr(self, name)):
                raise ValueError(
                    f"{name} ({value}) cannot be combined with latent, which derives keys and values from "
                    "one latent vector; leave one of them out"
                )
        return self

    def build(
        self, d_model: int, causal: bool, norm: NormConfig, window: int | None = None
    ) -> nn.Module:
        """Return a new module with its layer's window, which `layer_windows` reads from `window_at`."""
        if self.latent is not None:
            return LatentAttention(self, self.latent, d_model, causal, norm, window)
        kind = SinkAttention if self.sinks else SelfAttention
        return kind(self, d_model, causal, norm, window)

    def describe(self, window: int | None = None) -> str:
        """Return a short description for tables."""
        what = f"latent of {self.latent.kv_rank}" if self.latent else f"{self.kv_heads} key-value"
        sinks = ", sinks" if self.sinks else ""
        return f"{self.num_heads} heads, {what}{sinks}" + (f", window {window}" if window else "")

    def head_width(self, d_model: int) -> int:
        return self.head_dim or d_model // self.num_heads

    def rotated_width(self, d_model: int) -> int:
        """Return the width of each head that rotary positions rotate."""
        return self.latent.rotated_dim if self.latent else self.head_width(d_model)

    def score_width(self, d_model: int) -> int:
        """Return the width of the queries and keys of a head, whose square root divides the scores."""
        rotated = self.latent.rotated_dim if self.latent else 0
        return self.head_width(d_model) + rotated

    def projections(self, d_model: int) -> tuple[tuple[int, int], ...]:
        """Return (input width, output width) of every projection matrix."""
        if self.latent is None:
            d_query, d_kv = self.widths(d_model)
            return (d_model, d_query), (d_model, d_kv), (d_model, d_kv), (d_query, d_model)
        latent, heads, head_dim = self.latent, self.num_heads, self.head_width(d_model)
        value_dim = latent.value_dim or head_dim
        d_query = heads * (head_dim + latent.rotated_dim)
        rank = latent.query_rank
        return (
            *(((d_model, rank), (rank, d_query)) if rank else ((d_model, d_query),)),
            (d_model, latent.kv_rank + latent.rotated_dim),
            (latent.kv_rank, heads * (head_dim + value_dim)),
            (heads * value_dim, d_model),
        )

    def biases(self, d_model: int) -> tuple[bool, ...]:
        """Return True for each of `projections` that has a bias; the last one is the output projection."""
        return (*[bool(self.bias)] * (len(self.projections(d_model)) - 1), self.bias is True)

    def widths(self, d_model: int) -> tuple[int, int]:
        """Return the total width of all query heads, and of all key (or value) heads."""
        head_dim = self.head_width(d_model)
        return self.num_heads * head_dim, self.kv_heads * head_dim

    def normed_widths(self, d_model: int) -> tuple[int, ...]:
        """Return the widths of the norms of queries and keys, or of the latent vectors."""
        if self.latent is not None:
            return (*filter(None, (self.latent.query_rank,)), self.latent.kv_rank)
        widths = {None: (), "head": 2 * (self.head_width(d_model),), "all": self.widths(d_model)}
        return widths[self.norm_qk]

    def num_params(self, d_model: int, norm: NormConfig) -> int:
        projections = zip(self.projections(d_model), self.biases(d_model), strict=True)
        matrices = sum(linear_params(*widths, bias) for widths, bias in projections)
        norms = sum(map(norm.num_params, self.normed_widths(d_model)))
        return matrices + norms + self.sinks * self.num_heads

    def flops_per_token(
        self, d_model: int, seq_len: int, causal: bool = True, window: int | None = None
    ) -> int:
        """Return forward FLOPs per token; a causal token attends to (seq_len + 1) / 2 tokens on average, or
        fewer with a window.
        """
        matrices = sum(linear_flops(*widths) for widths in self.projections(d_model))
        key_dim = value_dim = self.head_width(d_model)
        if self.latent is not None:
            key_dim += self.latent.rotated_dim
            # `_attend` pads values to the width of keys.
            value_dim = max(key_dim, self.latent.value_dim or value_dim)
        if self.sinks:
            key_dim = value_dim = key_dim + SINK_UNITS
        near = min(window or seq_len, seq_len)
        before = near - near * (near - 1) / (2 * seq_len)  # the first tokens have fewer before them
        attended = (before if causal else 2 * before - 1) + self.sinks
        return matrices + round(2 * self.num_heads * (key_dim + value_dim) * attended)


SINK_UNITS = 8
"""Units that sinks add to queries, keys and values; fused kernels want widths that are multiples of eight."""


class _Attention(nn.Module):
    needs_mask = False
    """True if `_attend` needs a mask of causal attention too."""

    def __init__(self, config: AttentionConfig, causal: bool, window: int | None) -> None:
        super().__init__()
        self.causal = causal
        self.window = window
        self.num_heads = config.num_heads
        self.dropout = config.dropout

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float
    ) -> Tensor:
        """Return the attention output of whole sequences, (B, S, H d); arguments are (B, H, S, d)."""
        width = value.shape[-1]
        dropout = self.dropout if self.training else 0.0
        if key.shape[-1] > width:
            # Fused kernels require equal widths; other kernels need memory quadratic in the length.
            value = F.pad(value, (0, key.shape[-1] - width))
        if attn_mask is None and not dropout and _is_compiled(query, key, value):
            attended = _CompiledAttention.apply(query, key, value, self.causal, scale)
        else:
            attended = F.scaled_dot_product_attention(
                query,
                key,
                value,
                attn_mask=attn_mask,
                is_causal=self.causal and attn_mask is None,
                dropout_p=dropout,
                scale=scale,
                enable_gqa=key.shape[1] != query.shape[1],
            )
        return rearrange(attended[..., :width], "b h s d -> b s (h d)")

    def _attend_cached(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float
    ) -> Tensor:
        """Return the attention of new tokens to all cached tokens, (B, H, S, d), with grouped queries."""
        num_heads, num_new = query.shape[1], query.shape[2]
        groups = num_heads // key.shape[1]
        # The query heads of a group become rows of one head, so that keys need not be repeated.
        query = query.reshape(len(query), key.shape[1], groups * num_new, query.shape[-1])
        if attn_mask is not None and num_new > 1:
            attn_mask = attn_mask.repeat(1, 1, groups, 1)
        attended = F.scaled_dot_product_attention(
            query, key, value, attn_mask=attn_mask, scale=scale
        )
        return attended.reshape(len(attended), num_heads, num_new, attended.shape[-1])

    def _mask(self, x_BSD: Tensor, mask_BS: Tensor | None) -> Tensor | None:
        """Return True where a token may attend, bool (B or 1, 1, S, S); None for all (earlier) tokens.
        Padding attends to itself, since the softmax of its row would otherwise be NaN.
        """
        length = x_BSD.shape[1]
        has_window = self.window is not None and self.window < length
        if mask_BS is None and not has_window and not self.needs_mask:
            return None
        positions_S = torch.arange(length, device=x_BSD.device)
        distance = positions_S.unsqueeze(-1) - positions_S
        near = distance.abs() < (self.window or length)
        allowed = (near & (distance >= 0) if self.causal else near).unsqueeze(0)
        if mask_BS is not None:
            allowed = (allowed & mask_BS[:, None, :]) | (distance == 0)
        return allowed[:, None]


def _is_compiled(*heads: Tensor) -> bool:
    """Return True if the C++ kernel trains attention on these heads. Without gradients torch computes it,
    because oneDNN compiles code for each new sequence length.
    """
    return (
        needs_gradient(*heads)
        and len({x_BHSd.shape[-1] for x_BHSd in heads}) == 1
        and all(x_BHSd.dtype == torch.float32 for x_BHSd in heads)
        and not is_autocast_on(heads[0])
        and torch.backends.cuda.flash_sdp_enabled()  # `sdpa_kernel` also chooses CPU kernels
        and has_compiled_tiles(*heads)
    )


class _CompiledAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, is_causal: bool, scale: float
    ) -> Tensor:
        operators = torch.ops.moe_ffn_cpu
        result, log_sums_BHS = operators.attention(query, key, value, is_causal, scale)
        ctx.save_for_backward(query, key, value, result, log_sums_BHS)
        ctx.options = is_causal, scale
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or is_batched(grads[0]):
            raise RuntimeError(
                "attention on a CPU supports neither create_graph nor is_grads_batched; use "
                "torch.nn.attention.sdpa_kernel(SDPBackend.MATH), which supports both"
            )
        operators = torch.ops.moe_ffn_cpu
        return *operators.attention_backward(*grads, *ctx.saved_tensors, *ctx.options), None, None


class SelfAttention(_Attention):
    """Computes softmax(q k^T / sqrt(d)) v over all tokens, or if causal, over each token and earlier ones."""

    def __init__(
        self,
        config: AttentionConfig,
        d_model: int,
        causal: bool,
        norm: NormConfig,
        window: int | None = None,
    ) -> None:
        super().__init__(config, causal, window)
        self.num_kv_heads = config.kv_heads
        self.norms_heads = config.norm_qk == "head"
        projections = zip(config.projections(d_model), config.biases(d_model), strict=True)
        self.query, self.key, self.value, self.output = (
            nn.Linear(*widths, bias=bias) for widths, bias in projections
        )
        self.query_norm = self.key_norm = None
        if widths := config.normed_widths(d_model):
            self.query_norm, self.key_norm = map(norm.build, widths)

    def forward(
        self,
        x_BSD: Tensor,
        positions: PositionEncoding,
        mask_BS: Tensor | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Return the attention output of each token, (B, S, D). Real tokens (`mask_BS`) do not attend to
        padding, which attends to itself; `cache` holds keys and values of earlier tokens and gets the new
        ones.
        """
        query = self._heads(self.query(x_BSD), self.num_heads, self.query_norm)
        key = self._heads(self.key(x_BSD), self.num_kv_heads, self.key_norm)
        value = rearrange(self.value(x_BSD), "b s (h d) -> b h s d", h=self.num_kv_heads)
        query, key = positions.rotate(query), positions.rotate(key)
        scale = positions.score_factor / math.sqrt(key.shape[-1])
        if cache is not None:
            cached_key, cached_value = cache.extend(key, value)
            if not cache.new.is_first:
                attn_mask = cache.new.attn_mask_within(self.window, x_BSD.device)
                attended = self._attend_cached(query, cached_key, cached_value, attn_mask, scale)
                return self.output(rearrange(attended, "b h s d -> b s (h d)"))
            mask_BS = None  # padding comes last, so no real token attends to it
        return self.output(self._attend(query, key, value, self._mask(x_BSD, mask_BS), scale))

    def _heads(self, x_BSD: Tensor, num_heads: int, norm: nn.Module | None) -> Tensor:
        if norm is not None and not self.norms_heads:
            x_BSD = norm(x_BSD)
        x_BHSd = rearrange(x_BSD, "b s (h d) -> b h s d", h=num_heads)
        return norm(x_BHSd) if norm is not None and self.norms_heads else x_BHSd


class SinkAttention(SelfAttention):
    """Attention whose heads may attend to nothing: softmax([q k^T / sqrt(d), sink]) without its last column,
    times v (GPT-OSS, arXiv:2508.10925).
    """

    needs_mask = True

    def __init__(
        self,
        config: AttentionConfig,
        d_model: int,
        causal: bool,
        norm: NormConfig,
        window: int | None = None,
    ) -> None:
        super().__init__(config, d_model, causal, norm, window)
        self.sink_H = nn.Parameter(torch.zeros(self.num_heads))

    def _attend(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float
    ) -> Tensor:
        return super()._attend(*self._with_sink(query, key, value, attn_mask, scale), scale)

    def _attend_cached(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float
    ) -> Tensor:
        return super()._attend_cached(*self._with_sink(query, key, value, attn_mask, scale), scale)

    def _with_sink(
        self, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, scale: float
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """Append a key with value zero, whose score with every query is the sink's logit: queries get units
        for it, which are zero in all other keys.
        """
        units = (self.sink_H / (SINK_UNITS * scale)).to(query.dtype)[:, None, None]
        query = torch.cat([query, units.expand(*query.shape[:3], SINK_UNITS)], dim=-1)
        key, value = F.pad(key, (0, SINK_UNITS, 0, 1)), F.pad(value, (0, 0, 0, 1))
        key[..., -1, -SINK_UNITS:] = 1
        if attn_mask is not None:
            attn_mask = F.pad(attn_mask, (0, 1), value=True)
        return query, key, value, attn_mask


class LatentAttention(_Attention):
    """Multi-head latent attention: projects keys and values from one normalised latent vector per token.

    A key concatenates its projection from the latent vector and a rotated vector that all heads share. Scores
    are divided by the square root of the sum of both widths (DeepSeek-V2, arXiv:2405.04434, equations 9-19).
    """

    def __init__(
        self,
        config: AttentionConfig,
        latent: LatentConfig,
        d_model: int,
        causal: bool,
        norm: NormConfig,
        window: int | None = None,
    ) -> None:
        super().__init__(config, causal, window)
        self.head_dim = config.head_width(d_model)
        self.kv_rank = latent.kv_rank
        *query, kv_down, kv_up, output = (
            nn.Linear(*widths, bias=False) for widths in config.projections(d_model)
        )
        between = [] if latent.query_rank is None else [norm.build(latent.query_rank)]
        self.query = nn.Sequential(query[0], *between, *query[1:])
        self.kv_down, self.kv_up, self.output = kv_down, kv_up, output
        self.kv_norm = norm.build(latent.kv_rank)

    def forward(
        self,
        x_BSD: Tensor,
        positions: PositionEncoding,
        mask_BS: Tensor | None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """See `SelfAttention.forward`."""
        heads = self.num_heads
        query = rearrange(self.query(x_BSD), "b s (h d) -> b h s d", h=heads)
        latent, shared_key = self.kv_down(x_BSD).tensor_split([self.kv_rank], dim=-1)
        latent = self.kv_norm(latent)
        plain, rotated = query.tensor_split([self.head_dim], dim=-1)
        rotated, shared_key = positions.rotate(rotated), positions.rotate(shared_key[:, None])
        scale = positions.score_factor / math.sqrt(query.shape[-1])
        if cache is not None:
            (cached,) = cache.extend(torch.cat([latent[:, None], shared_key], dim=-1))
            if not cache.new.is_first:
                attn_mask = cache.new.attn_mask_within(self.window, x_BSD.device)
                return self.output(self._attend_latents(plain, rotated, cached, attn_mask, scale))
            mask_BS = None  # padding comes last, so no real token attends to it
        key_value = rearrange(self.kv_up(latent), "b s (h d) -> b h s d", h=heads)
        key, value = key_value.tensor_split([self.head_dim], dim=-1)
        query = torch.cat([plain, rotated], dim=-1)
        key = torch.cat([key, shared_key.expand(-1, heads, -1, -1)], dim=-1)
        return self.output(self._attend(query, key, value, self._mask(x_BSD, mask_BS), scale))

    def _attend_latents(
        self, plain: Tensor, rotated: Tensor, cached: Tensor, attn_mask: Tensor | None, scale: float
    ) -> Tensor:
        """Return the attention of new tokens, (B, S, H d), without projecting the cached latent vectors c,
        (B, 1, L, kv_rank + rotated_dim) with their rotated keys. q . (K c) = (K^T q) . c, and sum(V c) = V
        sum(c), so both matrices multiply only vectors of new tokens ("absorbed", section 2.1.2).
        """
        up_HdR = rearrange(self.kv_up.weight, "(h d) r -> h d r", h=self.num_heads)
        key_HdR, value_HdR = up_HdR.tensor_split([self.head_dim], dim=1)
        query = torch.cat([plain @ key_HdR, rotated], dim=-1)
        attended = self._attend_cached(query, cached, cached, attn_mask, scale)[..., : self.kv_rank]
        return rearrange(attended @ value_HdR.mT, "b h s d -> b s (h d)")
