"""Interface of every router, (tokens, context) -> Routing, and functions and layers that routers share.

T tokens, D model width, E experts, K listed experts per token, N = T*K pairs
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, Self, TypeVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from moe_ffn.config.base import MAX_COUNT, Config, TaggedConfig, describe_options
from moe_ffn.config.errors import ConfigError, Unsupported, UseCase
from moe_ffn.config.sizes import linear_flops, linear_params
from moe_ffn.kernels.activations import soft_cap
from moe_ffn.kernels.base import init_linear_, without_autocast
from moe_ffn.kernels.routing import float32_linear, float32_linear_backward
from moe_ffn.outputs import Routing, TokenContext


class RouterConfig(TaggedConfig, frozen=True):
    """Config of a router, which chooses the experts of each token and their weights."""

    has_selection_probs: ClassVar[bool] = False
    """True if the router returns a `NoisyRouting` in training, which the loss `load_cv2` needs."""
    learns: ClassVar[bool] = True
    """False if the assignment is fixed, so that no loss or rule can change it."""
    lookahead_reason: ClassVar[str] = ""
    """Reason why the router is not causal, which completes `type 'NAME' ...`, such as `ranks tokens against
    later ones`; empty if it is causal."""
    is_tokenwise: ClassVar[bool] = False
    """True if, in evaluation, a token's experts depend only on the token and its id."""
    is_pairs_only: ClassVar[bool] = False
    """True if the router returns a `PairsOnlyRouting`, without (T, E) tables."""
    draws_k: ClassVar[bool] = False
    """True if each step of training draws k, between the options `k_min` and `k_max`."""

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        """Return why this router cannot serve a use case; None if it can. See `lookahead_reason`."""
        if self.lookahead_reason and (
            use_case.causal or (use_case.cached and not self.is_tokenwise)
        ):
            return Unsupported(f"type '{self.type}' {self.lookahead_reason}", "use 'top_k'")
        if use_case.cached and not self.is_tokenwise:
            return Unsupported(
                f"type '{self.type}' is not known to route each token independently, so it cannot decode "
                "with a cache",
                "if it does, set is_tokenwise: ClassVar[bool] = True in its config",
            )
        return None

    @property
    def option_that_fixes_choice(self) -> str | None:
        """Name of the option that fixes the assignment, so that only weights are learned; None by default."""
        return None

    @property
    def has_correction_bias(self) -> bool:
        """True if the router has a bias that `objective.bias_rule` moves: the option `correction_bias`."""
        return getattr(self, "correction_bias", False)

    @property
    def option_that_changes_ranking(self) -> str | None:
        """Option with which a token's experts are not its k largest scores + bias, of scores from 0 to 1."""
        return None

    def check_num_experts(self, num_experts: int) -> None:
        """Raise ValueError if the router cannot serve `num_experts` experts."""

    def with_k(self, k: int) -> Self | None:
        """Return a config for evaluation with k experts per token; None if k has no effect after training."""
        return None

    @abstractmethod
    def build(self, d_model: int, num_experts: int) -> Router:
        """Return a new router of `num_experts` experts for tokens of width `d_model`."""

    @abstractmethod
    def experts_per_token(self, num_experts: int) -> float:
        """Return the mean number of experts per token, or the maximum if the number depends on the data."""

    def pairs_per_token(self, num_experts: int, seq_len: int) -> float:
        """Return the mean experts per token in sequences of `seq_len` tokens; some routers round counts."""
        return self.experts_per_token(num_experts)

    @abstractmethod
    def num_params(self, d_model: int, num_experts: int) -> int:
        """Return the number of parameters of the router that `build` returns."""

    @abstractmethod
    def flops_per_token(self, d_model: int, num_experts: int) -> int:
        """Return the forward FLOPs of the matrix products for one token."""

    def describe(self) -> str:
        """Return a short description for tables."""
        return self.type


class RouterMLPConfig(Config, frozen=True):
    """A small network between the token and the projection to logits, as in transformers' `zaya`.

    h = RMSNorm(W_0 x + b_0), then `depth` times h = GELU(W_i h + b_i); the projection reads h.
    """

    width: int = Field(default=256, ge=1, le=MAX_COUNT)
    """Width of all layers."""
    depth: int = Field(default=2, ge=0, le=100)
    """Number of layers with an activation."""
    eps: float = Field(default=1e-6, gt=0, lt=1)
    """Added to the mean of squares in the norm."""

    def num_params(self, d_model: int) -> int:
        layers = self.depth * linear_params(self.width, self.width, bias=True)
        return linear_params(d_model, self.width, bias=True) + self.width + layers

    def flops_per_token(self, d_model: int) -> int:
        return linear_flops(d_model, self.width) + self.depth * linear_flops(self.width, self.width)


class RouterNormConfig(Config, frozen=True):
    """RMS norm with a learned scale, for the input or the queries of a router."""

    eps: float = Field(default=1e-6, gt=0, lt=1)
    """Added to the mean of squares."""


class LinearRouterConfig(RouterConfig, frozen=True):
    """A router whose logits are a projection of the token."""

    omitted_defaults: ClassVar[frozenset[str]] = frozenset({"logit_scale"})
    """Options that the router's repr omits if they have their defaults."""

    bias: bool = False
    """Add a learned bias to the logits, as GPT-OSS does."""
    jitter: float = Field(default=0.0, ge=0, lt=1)
    """In training, multiply the router's input by noise from U(1 - jitter, 1 + jitter) (Switch)."""
    input_norm: RouterNormConfig | None = None
    """RMS norm of the router's input (Gemma 4); none by default."""
    mlp: RouterMLPConfig | None = None
    """A small network before the projection; none by default."""
    logit_scale: float = Field(default=1.0, gt=0, le=MAX_COUNT)
    """Multiplies the logits."""
    logit_cap: float | None = Field(default=None, gt=0, le=MAX_COUNT)
    """Limits the logits to (-cap, cap) by cap * tanh(logit / cap); none by default."""

    def num_params(self, d_model: int, num_experts: int) -> int:
        norm = 0 if self.input_norm is None else d_model
        if self.mlp is None:
            return norm + linear_params(d_model, num_experts, self.bias)
        projection = linear_params(self.mlp.width, num_experts, self.bias)
        return norm + self.mlp.num_params(d_model) + projection

    def flops_per_token(self, d_model: int, num_experts: int) -> int:
        if self.mlp is None:
            return linear_flops(d_model, num_experts)
        return self.mlp.flops_per_token(d_model) + linear_flops(self.mlp.width, num_experts)


class MeanKConfig(RouterConfig, frozen=True):
    """A router whose option `k` is the mean number of experts per token; most give every token exactly k."""

    k: float = Field(default=2.0, gt=0)
    """Experts per token, on average."""

    counts: ClassVar[tuple[str, ...]] = ("k",)
    """Options that number the experts of a token; the last one is their maximum in training."""

    def check_num_experts(self, num_experts: int) -> None:
        for option in self.counts:
            if (k := getattr(self, option)) > num_experts:
                raise ValueError(
                    f"router.{option} ({k:g}) must not exceed num_experts ({num_experts}); "
                    f"lower router.{option} or raise num_experts"
                )

    def experts_per_token(self, num_experts: int) -> float:
        return self.k

    def describe(self) -> str:
        return f"{self.type} k={self.k:g}"


class LinearTopKConfig(MeanKConfig, LinearRouterConfig, frozen=True):
    """A linear router that sends every token to k experts: the base of most custom routers."""

    k: int = Field(default=2, ge=1, le=MAX_COUNT)
    """Experts per token."""

    def with_k(self, k: int) -> Self | None:
        return None if self.option_that_fixes_choice else self.model_copy(update={"k": k})


class Router(nn.Module, ABC):
    """Chooses the experts of each token. It stores no statistics: losses and metrics read the `Routing`."""

    replays: ClassVar[bool] = False
    """True if the router uses `TokenContext.expert_ids` instead of its own choice."""

    correction_bias_E: Tensor | None
    """float32, added to the scores for selection only. A rule of `moe_ffn.balancing` changes it
    between optimizer steps; `forward` never does. None for a router without a correction bias."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("correction_bias_E", None)

    @abstractmethod
    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        """Route flattened tokens; `context` is flattened too (`ffn.base.flatten_tokens`)."""

    def max_tokens(self, sequence_length: int) -> int:
        """Return the maximum number of tokens of one sequence that an expert can take."""
        return sequence_length

    def expert_rows(self) -> dict[str, Tensor]:
        """Return parameters and buffers with one row per expert; ConfigError if one has no such rows."""
        raise self._no_rows()

    def _no_rows(self, where: str = "", fix: str = "") -> ConfigError:
        return ConfigError(
            f"{type(self).__name__} has no row for each expert{where}, so its experts cannot be pruned, "
            f"merged or copied; {fix}use router.type top_k or sigmoid_top_k"
        )

    def begin_step(self, generator: torch.Generator) -> None:
        """Draw the random numbers that all batches and ranks of a step share; none by default."""

    def observe(self, routing: Routing) -> Tensor | None:
        """Return a tensor of a batch's routing, which the trainer sums for `update`; None if unused."""
        return None

    def update(self, observed: Tensor) -> None:
        """Update the buffers, without gradient, by the sum from `observe`; the optimizer steps later."""

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        # `module.bfloat16()` calls this. Buffers keep their dtype: bfloat16 would lose a bias step of 0.001.
        before = {name: buffer for name, buffer in self._buffers.items() if buffer is not None}
        super()._apply(fn, recurse)
        for name, buffer in before.items():
            after = getattr(self, name)
            # A buffer from the meta device (`to_empty`) has no values to restore.
            restored = after.to(buffer.dtype) if buffer.is_meta else buffer.to(after.device)
            setattr(self, name, restored)
        return self


class LinearRouter(Router):
    """A router whose logits are a projection of the token."""

    config: Any  # each subclass has its own config class

    def __init__(self, config: LinearRouterConfig, d_model: int, num_experts: int) -> None:
        super().__init__()
        self.config = config
        self.input_norm = self.mlp = None
        if config.input_norm is not None:
            self.input_norm = Float32RMSNorm(d_model, config.input_norm.eps)
        if config.mlp is not None:
            self.mlp = RouterMLP(config.mlp, d_model)
            d_model = config.mlp.width
        self.projection = RouterLinear(d_model, num_experts, config.bias)
        if config.has_correction_bias:
            self.correction_bias_E = torch.zeros(num_experts, dtype=torch.float32)

    def logits(self, x_TD: Tensor) -> Tensor:
        """Return the logits, (T, E), float32 or wider."""
        config = self.config
        if self.training and config.jitter:
            x_TD = jittered(x_TD, config.jitter)
        if self.input_norm is not None:
            x_TD = self.input_norm(x_TD)
        logits_TE = self.projection(x_TD if self.mlp is None else self.mlp(x_TD))
        if config.logit_scale != 1:
            logits_TE = logits_TE * config.logit_scale
        if config.logit_cap is not None:
            logits_TE = soft_cap(logits_TE, config.logit_cap)
        return logits_TE

    def ranking(self, values_TE: Tensor) -> Tensor:
        """Return the values (T, E) by which experts are chosen: detached, plus the correction bias."""
        values_TE = values_TE.detach()
        return values_TE if self.correction_bias_E is None else values_TE + self.correction_bias_E

    def expert_rows(self) -> dict[str, Tensor]:
        state = self.state_dict(keep_vars=True)
        num_experts = len(self.projection.weight)
        others = [
            name
            for name, value in state.items()
            if name.startswith(("input_norm.", "mlp."))  # also if d_model equals num_experts
            or not value.ndim
            or len(value) != num_experts
        ]
        if others:
            fix = "let your own expert_rows() return only rows, or "
            raise self._no_rows(f" in {', '.join(others)}", fix)
        return state

    def extra_repr(self) -> str:
        config, fields = self.config, type(self.config).model_fields
        omitted = [n for n in config.omitted_defaults if getattr(config, n) == fields[n].default]
        return describe_options(config, without=["type", *omitted])


def jittered(x: Tensor, jitter: float) -> Tensor:
    """Return `x` times noise from U(1 - jitter, 1 + jitter), float32 or wider."""
    noise = torch.empty_like(x, dtype=RouterLinear.dtype_for(x))
    return x * noise.uniform_(1 - jitter, 1 + jitter)


class RouterMLP(nn.Module):
    """h = RMSNorm(W_0 x + b_0), then h = GELU(W_i h + b_i), in float32; see `RouterMLPConfig`."""

    def __init__(self, config: RouterMLPConfig, d_model: int) -> None:
        super().__init__()
        self.into = RouterLinear(d_model, config.width, bias=True)
        self.norm = Float32RMSNorm(config.width, config.eps)
        layers = (RouterLinear(config.width, config.width, bias=True) for _ in range(config.depth))
        self.layers = nn.ModuleList(layers)

    def forward(self, x_TD: Tensor) -> Tensor:
        h = self.norm(self.into(x_TD))
        for layer in self.layers:
            h = F.gelu(layer(h))
        return h


class Float32RMSNorm(nn.RMSNorm):
    """An RMS norm that computes and returns float32, or float64 for float64 input, in any model."""

    def forward(self, x: Tensor) -> Tensor:
        dtype = RouterLinear.dtype_for(x)
        return F.rms_norm(x.to(dtype), self.normalized_shape, self.weight.to(dtype), self.eps)


class RouterLinear(nn.Module):
    """The router's projection, computed in float32, also in bfloat16 models and under autocast.

    In bfloat16 the logits of two experts are often equal (Switch Transformer, section 2.4, "selective
    precision"). `x.float()` is not enough, because autocast would still multiply in bfloat16.
    """

    def __init__(self, d_model: int, num_experts: int, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        self.bias = nn.Parameter(torch.zeros(num_experts)) if bias else None
        init_linear_(self.weight)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Return the logits (T, E), float32 (float64 for a float64 layer)."""
        dtype = self.dtype_for(x_TD)
        weight_ED = self.weight.to(dtype)
        bias_E = None if self.bias is None else self.bias.to(dtype)
        # Also without gradients: with activation checkpointing both passes must choose the same experts.
        if x_TD.dtype != dtype and not torch.compiler.is_compiling():
            return _Float32Linear.apply(x_TD, weight_ED, bias_E)
        with without_autocast(x_TD):
            return F.linear(x_TD.to(dtype), weight_ED, bias_E)

    def extra_repr(self) -> str:
        num_experts, d_model = self.weight.shape
        return f"d_model={d_model}, num_experts={num_experts}, bias={self.bias is not None}"

    @staticmethod
    def dtype_for(x_TD: Tensor) -> torch.dtype:
        return torch.float64 if x_TD.dtype == torch.float64 else torch.float32


class _Float32Linear(torch.autograd.Function):
    """`F.linear` in the dtype of the weight, which saves x in its own dtype for backward: in bfloat16, a
    converted copy would be a fifth of all saved activations of a layer.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x_TD: Tensor, weight_ED: Tensor, bias_E: Tensor | None) -> Tensor:
        logits_TE = float32_linear(x_TD, weight_ED)
        return logits_TE if bias_E is None else logits_TE + bias_E

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x_TD, weight_ED, _ = inputs
        ctx.save_for_backward(x_TD, weight_ED)
        ctx.save_for_forward(x_TD, weight_ED)

    @staticmethod
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, grad_TE: Tensor
    ) -> tuple[Tensor | None, ...]:
        x_TD, weight_ED = ctx.saved_tensors
        needs_x, needs_weight, needs_bias = ctx.needs_input_grad
        grads = float32_linear_backward(
            grad_TE, x_TD, weight_ED, wants_x=needs_x, wants_weight=needs_weight
        )
        return *grads, grad_TE.sum(dim=0) if needs_bias else None

    @staticmethod
    def jvp(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, tangent_x_TD: Tensor | None, tangent_ED: Tensor | None, tangent_E: Tensor | None
    ) -> Tensor:
        """Return the tangent of the logits, for forward-mode differentiation."""
        x_TD, weight_ED = ctx.saved_tensors
        dtype = weight_ED.dtype
        tangent_TE = torch.zeros((), dtype=dtype, device=x_TD.device)
        with without_autocast(x_TD):
            if tangent_x_TD is not None:
                tangent_TE = tangent_TE + F.linear(tangent_x_TD.to(dtype), weight_ED)
            if tangent_ED is not None:
                tangent_TE = tangent_TE + F.linear(x_TD.to(dtype), tangent_ED)
        return tangent_TE if tangent_E is None else tangent_TE + tangent_E


Kind = TypeVar("Kind", bound=Routing)


def routing_of_pairs(
    weights_TK: Tensor,
    expert_ids_TK: Tensor,
    logits_TE: Tensor | None,
    scores_TE: Tensor | None,
    context: TokenContext,
    *,
    num_experts: int | None = None,
    kind: type[Kind] = Routing,
    **fields: Any,
) -> Kind:
    """Return the routing of a router that lists K experts for every token: N = T*K pairs, token-major.

    Args:
        weights_TK: factor of each chosen expert's output; the task trains the router only through it.
        expert_ids_TK: chosen experts, int64 from 0 to E - 1.
        logits_TE: output of the router before any normalisation, which the loss `router_z` reads; None, like
            `scores_TE`, if there are too many experts for (T, E) tables; then `kind` is a `PairsOnlyRouting`.
        scores_TE: normalised logits of 0 or more, such as their softmax, which balancing losses read.
        context: argument of `Router.forward`, with the padding mask and the length of the sequences.
        num_experts: E; required if `logits_TE` is None.
        kind: class of the routing, such as `VariableKRouting`.
        fields: other fields of that class, such as `selected_N`.
    """
    if expert_ids_TK.ndim != 2 or weights_TK.shape != expert_ids_TK.shape:
        raise ValueError(
            "routing_of_pairs takes weights_TK and expert_ids_TK of one shape (T, K), but got "
            f"{tuple(weights_TK.shape)} and {tuple(expert_ids_TK.shape)}"
        )
    num_tokens, k = expert_ids_TK.shape
    if num_experts is None:
        if logits_TE is None:
            raise ValueError("routing_of_pairs without logits_TE needs num_experts")
        num_experts = logits_TE.shape[1]
    token_indices_T1 = torch.arange(num_tokens, device=expert_ids_TK.device).unsqueeze(-1)
    return kind(
        token_indices_N=token_indices_T1.expand(num_tokens, k).flatten(),
        expert_ids_N=expert_ids_TK.flatten(),
        weights_N=weights_TK.flatten(),
        dropped_N=torch.zeros(num_tokens * k, dtype=torch.bool, device=expert_ids_TK.device),
        num_tokens=num_tokens,
        num_experts=num_experts,
        sequence_length=context.sequence_length or num_tokens,
        mask_T=context.mask,
        logits_TE=logits_TE,
        scores_TE=scores_TE,
        **fields,
    )


def rankable_tokens(logits_TE: Tensor, mask_T: Tensor | None) -> Tensor:
    """Return bool (T,), True for real tokens with finite logits, which may be ranked together."""
    finite_T = logits_TE.isfinite().all(dim=-1)
    return finite_T if mask_T is None else finite_T & mask_T


def constant_weight_error(cause: str, fix: str) -> ValueError:
    """Return the error for options that would leave the router without a gradient."""
    return ValueError(
        f"{cause} makes every weight a constant 1, so the router would never learn; set {fix}"
    )
