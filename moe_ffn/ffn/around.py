"""What may stand around the experts of a block: norms, a projection into a narrower space, weighted inputs.

T tokens, D model width, N (token, expert) pairs, R rows
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from moe_ffn.config import MAX_COUNT, Config
from moe_ffn.dispatch import Dispatched
from moe_ffn.experts.base import Experts
from moe_ffn.kernels.base import check_dtype
from moe_ffn.sizes import linear_flops, linear_params


class LatentConfig(Config, frozen=True):
    """Experts in a narrower space: y = W_out sum_i w_i E_i(W_in x); router and shared expert read x.

    LatentMoE (Elango et al. 2026, arXiv:2601.18089), tried up to 95 B parameters and 1 T tokens; Nemotron 3.
    Weights of an expert, and tokens that ranks exchange, are d_model / width times smaller: so many times the
    experts, and experts per token, cost the same but for the two projections.
    """

    width: int = Field(ge=1, le=MAX_COUNT)
    """Width of the space, which is what the experts take for the model's."""
    bias: bool = False
    """Add a bias to both projections."""

    def num_params(self, d_model: int) -> int:
        into = linear_params(d_model, self.width, self.bias)
        return into + linear_params(self.width, d_model, self.bias)

    def flops_per_token(self, d_model: int) -> int:
        return 2 * linear_flops(d_model, self.width)


class InnerNormConfig(Config, frozen=True):
    """An RMS norm with a learned scale."""

    eps: float = Field(default=1e-6, gt=0, lt=1)
    """Added to the mean of squares."""
    scale: Literal["after", "before"] = "after"
    """Whether what is normalised is scaled, or what is scaled is normalised."""


class NormsConfig(Config, frozen=True):
    """RMS norms inside the block, none of them by default; `{}` is one with default options."""

    experts_input: InnerNormConfig | None = None
    """Of what the experts read; the router and the shared expert read the token without it (Gemma 4)."""
    each_expert: InnerNormConfig | None = None
    """Of what each expert returns, before it is weighted; all share one scale (Muse Spark)."""
    routed: InnerNormConfig | None = None
    """Of the routed experts' sum (Gemma 4)."""
    shared_input: InnerNormConfig | None = None
    """Of what the shared expert reads (Gemma 4)."""
    shared: InnerNormConfig | None = None
    """Of what the shared expert returns, before it joins (Gemma 4)."""
    output: InnerNormConfig | None = None
    """Of the output of the whole block (A.X K1)."""

    def widths(self, d_model: int, d_experts: int) -> dict[str, int]:
        """The norms that are asked for, by option, and their widths."""
        inside = ("experts_input", "each_expert")
        return {
            place: d_experts if place in inside else d_model
            for place, norm in self
            if norm is not None
        }

    def num_params(self, d_model: int, d_experts: int) -> int:
        return sum(self.widths(d_model, d_experts).values())


class InnerNorm(nn.RMSNorm):
    """An RMS norm whose output has the dtype of its input."""

    def __init__(self, config: InnerNormConfig, width: int) -> None:
        super().__init__(width, config.eps)
        self.scales_first = config.scale == "before"

    def forward(self, x: Tensor) -> Tensor:
        if not self.scales_first:
            return super().forward(x).to(x.dtype)
        return F.rms_norm(x * self.weight, self.normalized_shape, eps=self.eps).to(x.dtype)


class Norms(nn.Module):
    """The norms that are asked for, by the name of their option."""

    def __init__(self, config: NormsConfig, widths: Mapping[str, int]) -> None:
        super().__init__()
        for place, width in widths.items():
            self.add_module(place, InnerNorm(getattr(config, place), width))

    def forward(self, place: str, x: Tensor) -> Tensor:
        """`x` normalised, or as it is where no norm is asked for in that place."""
        found = self._modules.get(place)
        return x if found is None else found(x)


class Latent(nn.Module):
    """The two projections around experts in a narrower space."""

    def __init__(self, config: LatentConfig, d_model: int) -> None:
        super().__init__()
        self.into = nn.Linear(d_model, config.width, config.bias)
        self.out_of = nn.Linear(config.width, d_model, config.bias)

    def narrowed(self, x_TD: Tensor) -> Tensor:
        """`x_TD` in the space of the experts.

        Raises:
            ValueError: `x_TD` has another dtype than the weights, without autocast.
        """
        check_dtype(x_TD, self.into.weight)
        return self.into(x_TD)


def run_by_pair(
    experts: Experts,
    sent: Dispatched,
    *,
    weigh_input: bool,
    normed: Callable[[str, Tensor], Tensor],
) -> Tensor:
    """What experts return, (R, D), where more is done to a pair than its expert does.

    Args:
        weigh_input: whether the weight of a pair multiplies its expert's input, and not its output.
        normed: (place, values) -> values, with the norm of that place.
    """
    x_RD, plan = sent.rows(), sent.plan
    rows_ND, weights_N1 = x_RD.index_select(0, plan.token_ids_N), plan.weights_N.unsqueeze(-1)
    if weigh_input:
        rows_ND = (rows_ND * weights_N1).to(x_RD.dtype)
    places_N = torch.arange(rows_ND.shape[0], device=x_RD.device)
    pairs = replace(
        plan, token_ids_N=places_N, weights_N=torch.ones_like(plan.weights_N), pair_ids_N=places_N
    )
    y_ND = normed("each_expert", experts(rows_ND, pairs))
    if not weigh_input:
        y_ND = y_ND * weights_N1
    sums_RD = torch.zeros(x_RD.shape, dtype=y_ND.dtype, device=x_RD.device)
    return sums_RD.index_add_(0, plan.token_ids_N, y_ND).to(x_RD.dtype)
