"""Weights and hidden units of the networks in a block, for inspection and for converting models.

A custom block registers its functions with `@networks.register` and `@memories.register`; a custom kind of
expert defines `Experts.weights`.

T tokens, D model width, F hidden units of a network, N tokens of a network
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import singledispatch

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ffn.dispatch import make_plan
from moe_ffn.experts.base import Experts
from moe_ffn.ffn.base import flatten_tokens, without_padding
from moe_ffn.ffn.chain_of_experts import ChainOfExpertsFFN
from moe_ffn.ffn.dense import DenseFFN, GatedFFN, HiddenWidthFFN
from moe_ffn.ffn.mixture_of_depths import MixtureOfDepthsFFN, by_sequence, pick
from moe_ffn.ffn.moe import MoEFFN
from moe_ffn.ffn.wrappers import NormedFFN, WrapperFFN
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.outputs import Plan, TokenContext
from moe_ffn.routing.base import Router


@dataclass(frozen=True)
class Memory:
    """Hidden units of one network as key-value memories: each adds activation * value vector to the output.

    Geva et al. 2021 (arXiv:2012.14913), equation 2.
    """

    name: str
    """`expert 3`, `shared expert`; empty for the only network of a block."""

    token_ids_N: Tensor
    """int64, indices into the block's flattened tokens, without padding."""

    activations_NF: Tensor
    """Activations after the activation function and the gate, before the router's weights."""

    values_FD: Tensor
    """The columns of the matrix `down`."""


# -- weights


@singledispatch
def networks(block: nn.Module) -> ExpertWeights | None:
    """Return the weights of a block's E networks (one for a dense block); None for other kinds of blocks.

    The weights of experts are the parameters themselves, not copies.
    """
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
    into, bias = (block.gate, block.up), block.gate.bias
    return ExpertWeights(
        block.config.gate_activation,
        torch.cat([linear.weight for linear in into])[None],
        block.down.weight[None],
        gated=True,
        gate_function=block.config.gate_function,
        up_bias_EH=None if bias is None else torch.cat([linear.bias for linear in into])[None],
        down_bias_ED=None if bias is None else block.down.bias[None],
    )


@networks.register
def _(block: MoEFFN) -> ExpertWeights | None:
    return block.experts.weights()


# -- hidden units


@singledispatch
def memories(block: nn.Module, x: Tensor, context: TokenContext | None = None) -> list[Memory]:
    """Return the hidden units of each network in a block, with their activations for `x`.

    The arguments are those of `FFNBlock.forward`. The list is empty for the types `identity`,
    `soft_moe` and `normed`, and for custom blocks that register no function.
    """
    return []


@memories.register
def _(block: HiddenWidthFFN, x: Tensor, context: TokenContext | None = None) -> list[Memory]:
    hidden = block.hidden(x, context)
    hidden_TF = hidden.reshape(-1, hidden.shape[-1])
    real_T = torch.ones(len(hidden_TF), dtype=torch.bool, device=x.device)
    if context is not None and context.mask is not None:
        real_T = context.mask.reshape(-1)
    (ids_N,) = real_T.nonzero(as_tuple=True)
    return [Memory("", ids_N, hidden_TF[ids_N], block.values_FD)]


@memories.register
def _(block: MoEFFN, x: Tensor, context: TokenContext | None = None) -> list[Memory]:
    return _routed_memories(block, block.router, x, context)


@memories.register
def _(block: ChainOfExpertsFFN, x: Tensor, context: TokenContext | None = None) -> list[Memory]:
    found, hidden = list[Memory](), without_padding(x, context)
    for _, router, round_context in block.rounds(context):
        found += _routed_memories(block.ffn, router, hidden, round_context)
        routing = router(*flatten_tokens(hidden, round_context))
        hidden = hidden + block.ffn.run_experts(routing, hidden, round_context).hidden
    return found


@memories.register
def _(block: WrapperFFN, x: Tensor, context: TokenContext | None = None) -> list[Memory]:
    return memories(block.ffn, block.before(without_padding(x, context)), context)


@memories.register
def _(block: NormedFFN, x: Tensor, context: TokenContext | None = None) -> list[Memory]:
    return []


@memories.register
def _(block: MixtureOfDepthsFFN, x: Tensor, context: TokenContext | None = None) -> list[Memory]:
    x_TD, flat = flatten_tokens(x, context)
    _, chosen_BS = by_sequence(block.router(x_TD, flat))
    x_BMD, picked_BM, inner_context = pick(x_TD, flat, chosen_BS)
    length = chosen_BS.shape[1]
    first_B1 = torch.arange(len(chosen_BS), device=x.device).unsqueeze(-1) * length
    came_from = (first_B1 + picked_BM).flatten()
    return [
        replace(memory, token_ids_N=came_from[memory.token_ids_N])
        for memory in memories(block.ffn, x_BMD, inner_context)
    ]


def _routed_memories(
    block: MoEFFN, router: Router, x: Tensor, context: TokenContext | None
) -> list[Memory]:
    """Return the hidden units of the experts that `router` chooses, and of the shared expert."""
    x_TD, flat = flatten_tokens(x, context)
    routing = block.capacity.drop_over_capacity(router(x_TD, flat), training=block.training)
    found = _expert_memories(block.experts, x_TD, make_plan(routing, block.num_experts))
    if block.shared_expert is not None:
        shared = memories(block.shared_expert, x_TD.view_as(x), context)
        found += [replace(m, name=f"shared expert {m.name}".strip()) for m in shared]
    return found


def _expert_memories(experts: Experts, x_TD: Tensor, plan: Plan) -> list[Memory]:
    weights, found, start = experts.weights(), list[Memory](), 0
    if weights is None:
        return found
    for expert, end in enumerate(plan.offsets_E.tolist()):
        ids_N, start = plan.token_ids_N[start:end], end
        bias = None if weights.up_bias_EH is None else weights.up_bias_EH[expert]
        hidden_NF = weights.activate(F.linear(x_TD[ids_N], weights.up_EHD[expert], bias))
        values_FD = weights.down_EDF[expert].t()
        found.append(Memory(f"expert {expert}", ids_N, hidden_NF, values_FD))
    return found
