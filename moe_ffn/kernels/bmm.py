"""Experts padded to the load of the busiest one, and multiplied in one batched product per weight.

T tokens, D model width, E experts, C rows per expert, N computed (token, expert) pairs
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_ffn.dispatch import Plan
from moe_ffn.kernels.base import ExpertWeights, combine, outside_graphs


@outside_graphs
def bmm(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """Any device, any dtype, autocast included. Reads the loads on the host.

    Costs E times the busiest expert, so it is for loads that a capacity, or the router, keeps even.
    """
    sizes_E = plan.offsets_E.diff(prepend=plan.offsets_E.new_zeros(1))
    num_rows, capacity = int(plan.offsets_E[-1]), int(sizes_E.max())
    token_ids_N, weights_N = plan.token_ids_N[:num_rows], plan.weights_N[:num_rows]
    # Row n of expert e, whose rows begin at s, stands in place e * C + n - s.
    ranks_C = torch.arange(capacity, device=x_TD.device)
    places_N = (ranks_C < sizes_E.unsqueeze(-1)).flatten().nonzero().squeeze(-1)
    x_PD = x_TD.new_zeros(weights.num_experts * capacity, x_TD.shape[1])
    x_PD = x_PD.index_copy(0, places_N, x_TD.index_select(0, token_ids_N))
    x_ECD = x_PD.view(weights.num_experts, capacity, x_TD.shape[1])
    up_ECH = _linear(x_ECD, weights.up_EHD, weights.up_bias_EH)
    y_ECD = _linear(weights.activate(up_ECH), weights.down_EDF, weights.down_bias_ED)
    y_ND = y_ECD.flatten(0, 1).index_select(0, places_N)
    return combine(y_ND, x_TD, token_ids_N, weights_N)


def _linear(input_ECI: Tensor, weight_EOI: Tensor, bias_EO: Tensor | None) -> Tensor:
    output_ECO = torch.bmm(input_ECI, weight_EOI.mT)
    return output_ECO if bias_EO is None else output_ECO + bias_EO.unsqueeze(1)
