"""Experts that wrap other experts, and add a narrower space, norms, or weights on the input.

T tokens, D model width, N (token, expert) pairs, R rows
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field, model_validator
from torch import Tensor, nn

from moe_ffn.config.base import MAX_COUNT, Config
from moe_ffn.config.errors import Unsupported, UseCase, first_unsupported
from moe_ffn.config.sizes import linear_flops, linear_params
from moe_ffn.experts.base import Experts, ExpertsConfig, without_adapters
from moe_ffn.experts.matrices import GatedExpertsConfig
from moe_ffn.kernels.base import check_dtype, combine
from moe_ffn.outputs import Plan


class ExpertsWrapperConfig(ExpertsConfig, frozen=True):
    """Config of experts that wrap other experts; costs include those of the inner experts."""

    # A factory, because `GatedExpertsConfig` is complete only after all blocks are imported.
    experts: ExpertsConfig = Field(default_factory=GatedExpertsConfig)
    """The inner experts."""

    def inner_width(self, d_model: int) -> int:
        """Return the `d_model` of the inner experts."""
        return d_model

    def own_params(self, d_model: int) -> int:
        """Return the number of parameters of the wrapper itself."""
        return 0

    def own_flops(self, d_model: int) -> int:
        """Return the forward FLOPs per token of the wrapper's own matrix products."""
        return 0

    @property
    def innermost(self) -> ExpertsConfig:
        return self.experts.innermost

    def inner_wrappers(self) -> Iterator[ExpertsWrapperConfig]:
        """Yield the wrappers inside this one, from the outermost."""
        inner = self.experts
        while isinstance(inner, ExpertsWrapperConfig):
            yield inner
            inner = inner.experts

    def dispatch_width(self, d_model: int) -> int:
        return self.experts.dispatch_width(self.inner_width(d_model))

    def params_per_expert(self, d_model: int, experts_per_token: float) -> int:
        return self.experts.params_per_expert(self.inner_width(d_model), experts_per_token)

    def shared_params(self, d_model: int, experts_per_token: float) -> int:
        inner = self.experts.shared_params(self.inner_width(d_model), experts_per_token)
        return inner + self.own_params(d_model)

    def flops_per_pair(self, d_model: int, experts_per_token: float) -> int:
        return self.experts.flops_per_pair(self.inner_width(d_model), experts_per_token)

    def shared_flops_per_token(self, d_model: int, experts_per_token: float) -> int:
        return self.experts.shared_flops_per_token(self.inner_width(d_model), experts_per_token)

    def wrapper_flops_per_token(self, d_model: int) -> int:
        inner = self.experts.wrapper_flops_per_token(self.inner_width(d_model))
        return inner + self.own_flops(d_model)

    def with_fixed_width(self, d_model: int, experts_per_token: float) -> ExpertsConfig:
        fixed = self.experts.with_fixed_width(self.inner_width(d_model), experts_per_token)
        return self.model_copy(update={"experts": fixed})

    def unfit_width(self, d_model: int, experts_per_token: float) -> Unsupported | None:
        unfit = self.experts.unfit_width(self.inner_width(d_model), experts_per_token)
        return unfit and unfit.inside("experts")

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        return first_unsupported({"experts": self.experts}, use_case)


class ExpertsWrapper(Experts):
    """Experts that delegate to inner experts."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts
        self.are_embeddings = experts.are_embeddings

    @property
    def innermost(self) -> Experts:
        return without_adapters(self.experts).innermost

    def before_dispatch(self, x_TD: Tensor) -> Tensor:
        return without_adapters(self.experts).before_dispatch(x_TD)

    def after_combine(self, y_TD: Tensor) -> Tensor:
        return without_adapters(self.experts).after_combine(y_TD)

    def forward(self, x_TD: Tensor, plan: Plan) -> Tensor:
        return self.experts(x_TD, plan)


# -- a narrower space


class LatentExpertsConfig(ExpertsWrapperConfig, frozen=True):
    """Experts in a narrower space: y = W_out sum_i w_i E_i(W_in x); router and shared expert read x.

    LatentMoE (Elango et al. 2026, arXiv:2601.18089), tested up to 95 B parameters and 1 T tokens; Nemotron 3.
    The weights of an expert, and the tokens that ranks exchange, are d_model / width times smaller. Not
    counting the projections, that many times more experts and experts per token cost the same.

    Kimi K3 normalises the sum before W_out, as its scale depends on the chosen experts (report, equation 11;
    Megatron-LM #6804): `experts: {type: normed, output: {}}`.
    """

    type: Literal["latent"] = "latent"
    width: int = Field(ge=1, le=MAX_COUNT)
    """Width of the narrower space, the `d_model` of the inner experts."""
    bias: bool = False
    """Add a bias to both projections."""

    def inner_width(self, d_model: int) -> int:
        return self.width

    def own_params(self, d_model: int) -> int:
        into = linear_params(d_model, self.width, self.bias)
        out_of = linear_params(self.width, d_model, self.bias)
        return into + out_of

    def own_flops(self, d_model: int) -> int:
        return 2 * linear_flops(d_model, self.width)

    def build(self, d_model: int, num_experts: int, experts_per_token: float) -> Experts:
        return LatentExperts(self, d_model, num_experts, experts_per_token)


class LatentExperts(ExpertsWrapper):
    """Experts between a projection into a narrower space and one out of it."""

    def __init__(
        self, config: LatentExpertsConfig, d_model: int, num_experts: int, experts_per_token: float
    ) -> None:
        super().__init__(config.experts.build(config.width, num_experts, experts_per_token))
        self.into = nn.Linear(d_model, config.width, config.bias)
        self.out_of = nn.Linear(config.width, d_model, config.bias)

    def before_dispatch(self, x_TD: Tensor) -> Tensor:
        check_dtype(x_TD, self.into.weight)
        return super().before_dispatch(self.into(x_TD))

    def after_combine(self, y_TD: Tensor) -> Tensor:
        return self.out_of(super().after_combine(y_TD))


# -- norms


class InnerNormConfig(Config, frozen=True):
    """An RMS norm with a learned scale."""

    eps: float = Field(default=1e-6, gt=0, lt=1)
    """Added to the mean of squares."""
    scale: Literal["after", "before"] = "after"
    """Apply the learned scale after or before the normalisation."""


class InnerNorm(nn.RMSNorm):
    """An RMS norm whose output has the dtype of its input."""

    def __init__(self, config: InnerNormConfig, width: int) -> None:
        super().__init__(width, config.eps)
        self.scales_first = config.scale == "before"

    def forward(self, x: Tensor) -> Tensor:
        if not self.scales_first:
            return super().forward(x).to(x.dtype)
        return F.rms_norm(x * self.weight, self.normalized_shape, eps=self.eps).to(x.dtype)


def build_norm(config: InnerNormConfig | None, width: int) -> nn.Module:
    """Return the norm, or the identity for None."""
    return nn.Identity() if config is None else InnerNorm(config, width)


class NormedExpertsConfig(ExpertsWrapperConfig, frozen=True):
    """Experts between RMS norms; each norm is off by default, and `{}` is a norm with default options."""

    type: Literal["normed"] = "normed"
    input: InnerNormConfig | None = None
    """Norm of the experts' input; router and shared expert read the tokens without it (Gemma 4)."""
    each: InnerNormConfig | None = None
    """Norm of each expert's output before weighting; all experts share one scale (Muse Spark)."""
    output: InnerNormConfig | None = None
    """Norm of the weighted sum of the experts (Gemma 4)."""

    @model_validator(mode="after")
    def _reject_each_with_weighted_inputs(self) -> NormedExpertsConfig:
        types = [inner.type for inner in self.inner_wrappers()]
        if self.each is not None and "input_weighted" in types:
            raise ValueError(
                "each normalises outputs before they are weighted, but experts.type "
                "('input_weighted') weights inputs; write {type: input_weighted, experts: {type: "
                "normed, ...}}"
            )
        return self

    def own_params(self, d_model: int) -> int:
        outer = sum(norm is not None for norm in (self.input, self.output)) * d_model
        return outer + (0 if self.each is None else self.dispatch_width(d_model))

    def build(self, d_model: int, num_experts: int, experts_per_token: float) -> Experts:
        return NormedExperts(self, d_model, num_experts, experts_per_token)


class NormedExperts(ExpertsWrapper):
    """Experts between RMS norms."""

    def __init__(
        self, config: NormedExpertsConfig, d_model: int, num_experts: int, experts_per_token: float
    ) -> None:
        super().__init__(config.experts.build(d_model, num_experts, experts_per_token))
        self.input = build_norm(config.input, d_model)
        self.each = build_norm(config.each, config.dispatch_width(d_model))
        self.output = build_norm(config.output, d_model)

    def before_dispatch(self, x_TD: Tensor) -> Tensor:
        return super().before_dispatch(self.input(x_TD))

    def after_combine(self, y_TD: Tensor) -> Tensor:
        return self.output(super().after_combine(y_TD))

    def forward(self, x_TD: Tensor, plan: Plan) -> Tensor:
        if isinstance(self.each, nn.Identity):
            return self.experts(x_TD, plan)
        y_ND = self.each(self.experts(*rows_of_pairs(x_TD, plan)))
        return combine(y_ND, x_TD, plan.token_indices_N, plan.weights_N)


# -- weights on the input


class InputWeightedExpertsConfig(ExpertsWrapperConfig, frozen=True):
    """Experts whose inputs, not outputs, are multiplied by the router's weights (Llama 4)."""

    type: Literal["input_weighted"] = "input_weighted"

    @model_validator(mode="after")
    def _reject_experts_without_input(self) -> InputWeightedExpertsConfig:
        if not (kind := self.experts.innermost).reads_input:
            raise ValueError(
                f"type 'input_weighted' weights the input of experts, but experts of type '{kind.type}' "
                f"ignore their input; use '{kind.type}' without it"
            )
        return self

    def build(self, d_model: int, num_experts: int, experts_per_token: float) -> Experts:
        return InputWeightedExperts(self.experts.build(d_model, num_experts, experts_per_token))


class InputWeightedExperts(ExpertsWrapper):
    """y_t = sum over the pairs (t, i) of E_i(weight * x_t)."""

    def forward(self, x_TD: Tensor, plan: Plan) -> Tensor:
        rows_ND, pairs = rows_of_pairs(x_TD, plan)
        weighted_ND = (rows_ND * plan.weights_N.unsqueeze(-1)).to(x_TD.dtype)
        y_ND = self.experts(weighted_ND, pairs)
        sums_TD = torch.zeros(x_TD.shape, dtype=y_ND.dtype, device=x_TD.device)
        return sums_TD.index_add_(0, plan.token_indices_N, y_ND).to(x_TD.dtype)


def rows_of_pairs(x_RD: Tensor, plan: Plan) -> tuple[Tensor, Plan]:
    """Return a copy of each pair's token, (N, D), and a plan with one pair of weight 1 per copy."""
    rows_ND = x_RD.index_select(0, plan.token_indices_N)
    row_ids_N = torch.arange(rows_ND.shape[0], device=x_RD.device)
    pairs = replace(
        plan,
        token_indices_N=row_ids_N,
        weights_N=torch.ones_like(plan.weights_N),
        pair_ids_N=row_ids_N,
        pairs_per_token=None if plan.pairs_per_token is None else 1,
    )
    return rows_ND, pairs
