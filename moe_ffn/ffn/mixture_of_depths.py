"""Mixture of depths: some tokens pass through a block, and the rest skip it.

B sequences, S tokens per sequence, M maximum number of chosen tokens per sequence, D model width
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import torch
from einops import rearrange, repeat
from pydantic import model_validator
from torch import Tensor

from moe_ffn.config.errors import Unsupported, UseCase, first_unsupported
from moe_ffn.ffn.base import (
    OWN_ROUTING,
    FFNBlock,
    FFNConfig,
    RouterInfo,
    check_input,
    flatten_tokens,
    prefix_names,
)
from moe_ffn.ffn.dense import GatedConfig
from moe_ffn.kernels.base import is_transform_on, needs_static_shapes, reject_vmap
from moe_ffn.outputs import FFNOutput, Routing, TokenContext
from moe_ffn.routing import ExpertChoiceRouterConfig, RouterConfig
from moe_ffn.routing.base import Router


class MixtureOfDepthsConfig(FFNConfig, frozen=True):
    """Mixture of depths: a router sends a fraction k of the tokens through a block; the rest skip it.

    Raposo et al. 2024 (arXiv:2404.02258). The output for a skipped token is 0, so the residual stream leaves
    the token unchanged. The paper uses expert choice; the routers `relu` and `expert_threshold` are causal.
    """

    type: Literal["mixture_of_depths"] = "mixture_of_depths"
    ffn: FFNConfig = GatedConfig()
    """The block that processes the chosen tokens."""
    router: RouterConfig = ExpertChoiceRouterConfig(k=0.5, score="sigmoid")
    """Chooses the tokens and their weights; `router.k` is the chosen fraction."""

    @model_validator(mode="after")
    def _check_parts_against_each_other(self) -> MixtureOfDepthsConfig:
        if any(info.selects_tokens for info in self.ffn.router_infos().values()):
            raise ValueError(
                f"ffn.type ('{self.ffn.type}') must not be another mixture of depths; multiply their "
                "router.k instead"
            )
        if self.share >= 1:
            raise ValueError(
                f"router.type ('{self.router.type}') sends every token through the block ({self.share:g} "
                "per token); to skip some, use 'expert_choice' with score: sigmoid, 'relu' or "
                "'expert_threshold', with k below 1"
            )
        self.router.check_num_experts(1)
        return self

    @property
    def share(self) -> float:
        """Fraction of the tokens that pass through the block."""
        return self.router.experts_per_token(1)

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        if use_case.causal:
            if unsupported := self.router.unsupported(use_case):
                return replace(unsupported, advice="use 'relu' or 'expert_threshold'").inside(
                    "router"
                )
            if any(info.capacity.is_limited for info in self.ffn.router_infos().values()):
                return Unsupported(
                    "ffn.capacity depends on the number of chosen tokens, including later ones",
                    "set ffn.capacity.factor and eval_factor to null",
                )
        parts = {"router": self.router, "ffn": self.ffn}
        return first_unsupported(parts, replace(use_case, history=False))

    def router_infos(self) -> dict[str, RouterInfo]:
        inner = {
            name: replace(info.inside("ffn"), token_fraction=self.share)
            for name, info in self.ffn.router_infos().items()
        }
        return {OWN_ROUTING: RouterInfo(self.router, 1, selects_tokens=True)} | prefix_names(
            "inner", inner
        )

    def build(self, d_model: int) -> FFNBlock:
        return MixtureOfDepthsFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        return self.router.num_params(d_model, 1) + self.ffn.num_params(d_model)

    def num_active_params(self, d_model: int) -> int:
        router = self.router.num_params(d_model, 1)
        return router + round(self.share * self.ffn.num_active_params(d_model))

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        router = self.router.flops_per_token(d_model, 1)
        share = self.router.pairs_per_token(1, seq_len)
        inner_length = max(round(share * seq_len), 1)
        return router + round(share * self.ffn.flops_per_token(d_model, inner_length))

    def describe(self) -> str:
        return f"{self.router.describe()} of ({self.ffn.describe()})"


class MixtureOfDepthsFFN(FFNBlock):
    """y = r(x) * f(x) for the chosen tokens, 0 for the rest; the router has one expert, the block f.

    Raposo et al. 2024 (arXiv:2404.02258), equation 1, without the residual connection, which the model adds.
    The inner block reads the chosen tokens of each sequence, in order, as one shorter sequence.
    """

    def __init__(self, config: MixtureOfDepthsConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model
        self.router = config.router.build(d_model, 1)
        self.ffn = config.ffn.build(d_model)

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model, self)
        if is_transform_on():
            reject_vmap(
                x,
                self.parameters(),
                "a mixture of depths, because the sizes of its sequences depend on the data",
            )
        x_TD, flat = flatten_tokens(x, context)
        routing = self.router(x_TD, flat)
        weights_BS, chosen_BS = by_sequence(routing)
        max_chosen = None
        if needs_static_shapes(x_TD):
            max_chosen = self.router.max_tokens(chosen_BS.shape[1])
        x_BMD, position_BM, inner_context = gather_chosen(x_TD, flat, chosen_BS, max_chosen)
        inner = self.ffn(x_BMD, inner_context)
        weights_BM1 = torch.where(chosen_BS, weights_BS, 0).gather(1, position_BM).unsqueeze(-1)
        weighted_BMD = weights_BM1 * inner.hidden
        hidden = weighted_BMD.new_zeros(*chosen_BS.shape, x.shape[-1])
        index_BMD = repeat(position_BM, "b m -> b m d", d=x.shape[-1])
        hidden = hidden.scatter_add(1, index_BMD, weighted_BMD).to(x.dtype)
        return FFNOutput(
            hidden.reshape(x.shape),
            {OWN_ROUTING: routing} | prefix_names("inner", inner.routings),
            prefix_names("inner", inner.shared_shares),
        )

    def extra_repr(self) -> str:
        return f"d_model={self.d_model}"

    def routers(self) -> dict[str, Router]:
        return {OWN_ROUTING: self.router} | prefix_names("inner", self.ffn.routers())


def gather_chosen(
    x_TD: Tensor, flat: TokenContext, chosen_BS: Tensor, max_chosen: int | None = None
) -> tuple[Tensor, Tensor, TokenContext]:
    """Gather the chosen tokens of each sequence, in order, padded to M tokens, by default the largest number.
    Return x (B, M, D), positions in the sequences (B, M), and the inner block's context.
    """
    length = chosen_BS.shape[1]
    # Chosen tokens first; the stable sort keeps the order of both parts.
    order_BS = (~chosen_BS).to(torch.uint8).argsort(dim=1, stable=True)
    if max_chosen is None:
        max_chosen = int(chosen_BS.sum(dim=1).max()) if chosen_BS.numel() else 0
    position_BM = order_BS[:, :max_chosen]
    mask_BM = chosen_BS.gather(1, position_BM)
    ids_BM = flat.token_ids
    if ids_BM is not None:
        ids_BM = rearrange(ids_BM, "(b s) -> b s", s=length).gather(1, position_BM)
    index_BMD = repeat(position_BM, "b m -> b m d", d=x_TD.shape[-1])
    x_BMD = rearrange(x_TD, "(b s) d -> b s d", s=length).gather(1, index_BMD)
    # A padding token could overflow in the block, and infinity times weight 0 is NaN.
    x_BMD = x_BMD.masked_fill(~mask_BM.unsqueeze(-1), 0)
    return x_BMD, position_BM, TokenContext(mask=mask_BM, token_ids=ids_BM)


def by_sequence(routing: Routing) -> tuple[Tensor, Tensor]:
    """Return each token's weight, and True if it was chosen, both (B, S), from a routing to one expert."""
    ids_N, computed_N, weights_N = routing.token_indices_N, routing.computed_N, routing.weights_N
    chosen_T = computed_N.new_zeros(routing.num_tokens).scatter(0, ids_N, computed_N)
    weights_T = weights_N.new_zeros(routing.num_tokens).scatter(0, ids_N, weights_N)
    shape = (-1, max(routing.sequence_length, 1))
    return weights_T.view(shape), chosen_T.view(shape)
