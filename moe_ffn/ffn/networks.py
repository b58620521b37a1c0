"""Functions that return the weights and the hidden units of a block, to inspect and to convert models.

A custom block registers its functions with `@networks.register` and `@hidden_units.register`; a custom kind
of expert defines `Experts.weights`.

T tokens, D model width, F hidden units of a network, N tokens of a network
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import singledispatch
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ffn.experts.base import Experts
from moe_ffn.experts.low_precision import FakeQuantizedExperts
from moe_ffn.experts.matrices import MatrixExperts
from moe_ffn.ffn.base import flatten_tokens, without_padding
from moe_ffn.ffn.chain_of_experts import ChainOfExpertsFFN
from moe_ffn.ffn.dense import DenseFFN, GatedFFN, HiddenWidthFFN
from moe_ffn.ffn.dispatch import make_plan
from moe_ffn.ffn.mixture_of_depths import MixtureOfDepthsFFN, by_sequence, gather_chosen
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.ffn.wrappers import NormedFFN, WrapperFFN
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.outputs import Plan, TokenContext
from moe_ffn.routing.base import Router


@dataclass(frozen=True)
class HiddenUnits:
    """Hidden units as key-value memories; each adds activation * value (arXiv:2012.14913, eq. 2)."""

    name: str
    """`expert 3`, `shared expert`; empty for the only network of a block."""

    token_indices_N: Tensor
    """int64, indices into the block's flattened tokens, without padding."""

    activations_NF: Tensor
    """Hidden activations, after the gate and before the router's weights."""

    values_FD: Tensor
    """The columns of the matrix `down`."""


# -- weights


@singledispatch
def networks(block: nn.Module) -> ExpertWeights | None:
    """Return the weights of a block's E networks, uncopied for experts; None for other blocks."""
    return None


@networks.register
def _(block: DenseFFN) -> ExpertWeights:
    return ExpertWeights(
        block.config.activation,
        block.up.weight[None],
        block.down.weight[None],
        up_bias_EH=None if block.up.bias is None else block.up.bias[None],
        down_bias_ED=None if block.down.bias is None else block.down.bias[None],
    )


@networks.register
def _(block: GatedFFN) -> ExpertWeights:
    has_bias = block.down.bias is not None
    return ExpertWeights(
        block.config.gate_activation,
        torch.cat([block.gate.weight, block.up.weight])[None],
        block.down.weight[None],
        gated=True,
        gate_function=block.config.gate_function,
        up_bias_EH=torch.cat([block.gate.bias, block.up.bias])[None] if has_bias else None,
        down_bias_ED=block.down.bias[None] if has_bias else None,
    )


@networks.register
def _(block: MoEFFN) -> ExpertWeights | None:
    return block.experts.weights()


# -- hidden units


@singledispatch
def hidden_units(
    block: nn.Module, x: Tensor, context: TokenContext | None = None
) -> list[HiddenUnits]:
    """Return the hidden units of each network in a block, with their activations for `x`; no units for the
    types `identity`, `soft_moe` and `normed`, and unregistered custom blocks.
    """
    return []


@hidden_units.register
def _(block: HiddenWidthFFN, x: Tensor, context: TokenContext | None = None) -> list[HiddenUnits]:
    hidden = block.hidden(x, context)
    hidden_TF = hidden.reshape(-1, hidden.shape[-1])
    ids_N = torch.arange(len(hidden_TF), device=x.device)
    if context is not None and context.mask is not None:
        ids_N = ids_N[context.mask.reshape(-1)]
    return [HiddenUnits("", ids_N, hidden_TF[ids_N], block.values_FD)]


@hidden_units.register
def _(block: MoEFFN, x: Tensor, context: TokenContext | None = None) -> list[HiddenUnits]:
    return _routed_units(block, block.router, x, context)


@hidden_units.register
def _(
    block: ChainOfExpertsFFN, x: Tensor, context: TokenContext | None = None
) -> list[HiddenUnits]:
    units, hidden = list[HiddenUnits](), without_padding(x, context)
    for _, router, round_context in block.rounds(context):
        units += _routed_units(block.ffn, router, hidden, round_context)
        routing = router(*flatten_tokens(hidden, round_context))
        hidden = hidden + block.ffn.run_experts(routing, hidden, round_context).hidden
    return units


@hidden_units.register
def _(block: WrapperFFN, x: Tensor, context: TokenContext | None = None) -> list[HiddenUnits]:
    return hidden_units(block.ffn, block.before(without_padding(x, context)), context)


@hidden_units.register
def _(block: NormedFFN, x: Tensor, context: TokenContext | None = None) -> list[HiddenUnits]:
    return []


@hidden_units.register
def _(
    block: MixtureOfDepthsFFN, x: Tensor, context: TokenContext | None = None
) -> list[HiddenUnits]:
    x_TD, flat = flatten_tokens(x, context)
    _, chosen_BS = by_sequence(block.router(x_TD, flat))
    x_BMD, position_BM, inner_context = gather_chosen(x_TD, flat, chosen_BS)
    start_B1 = torch.arange(0, len(x_TD), chosen_BS.shape[1], device=x.device).unsqueeze(-1)
    outer_ids = (start_B1 + position_BM).flatten()
    return [
        replace(units, token_indices_N=outer_ids[units.token_indices_N])
        for units in hidden_units(block.ffn, x_BMD, inner_context)
    ]


def _routed_units(
    block: MoEFFN, router: Router, x: Tensor, context: TokenContext | None
) -> list[HiddenUnits]:
    """Return the hidden units of the experts that `router` chooses, and of the shared expert."""
    x_TD, flat = flatten_tokens(x, context)
    routing = block.capacity.apply_to(router(x_TD, flat), training=block.training)
    units = _expert_units(block.experts, x_TD, make_plan(routing, block.num_experts))
    if block.shared_expert is not None:
        shared = hidden_units(block.shared_expert, x_TD.view_as(x), context)
        units += [replace(m, name=f"shared expert {m.name}".strip()) for m in shared]
    return units


def _expert_units(experts: Experts, x_TD: Tensor, plan: Plan) -> list[HiddenUnits]:
    weights, units, start = experts.weights(), list[HiddenUnits](), 0
    if weights is None:
        return units
    if isinstance(experts, FakeQuantizedExperts):
        x_TD = experts.rounded_input(x_TD)
        weights = cast("MatrixExperts", experts.innermost).before_products(weights)
    for expert, end in enumerate(plan.offsets_E.tolist()):
        ids_N, start = plan.token_indices_N[start:end], end
        bias = None if weights.up_bias_EH is None else weights.up_bias_EH[expert]
        hidden_NF = weights.activate(F.linear(x_TD[ids_N], weights.up_EHD[expert], bias))
        values_FD = weights.down_EDF[expert].t()
        units.append(HiddenUnits(f"expert {expert}", ids_N, hidden_NF, values_FD))
    return units
