"""Expert by expert, with ordinary matrix products: any device, any dtype, autocast included.

T tokens, D model width, E experts, N (token, expert) pairs, O out, I in
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ffn.dispatch import Plan
from moe_ffn.kernels.base import ExpertWeights, combine, outside_graphs


@outside_graphs
def loop(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """One gather, two products per expert, one scatter. Reads the offsets on the host.

    An expert without tokens multiplies an empty slice, which keeps its gradient a zero instead of a
    missing one, on which DDP and FSDP would hang. Without gradients it is left out.
    """
    ends = plan.offsets_E.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    experts = range(weights.num_experts)
    if not torch.is_grad_enabled():
        experts = [expert for expert in experts if sizes[expert]]
        sizes = [sizes[expert] for expert in experts]
    # Without the pairs that are not computed: of ReLU or top-p routing they may be most of the list.
    token_ids_N, weights_N = plan.token_ids_N[: ends[-1]], plan.weights_N[: ends[-1]]
    if not sizes:
        return torch.zeros_like(x_TD)
    inputs = x_TD.index_select(0, token_ids_N).split_with_sizes(sizes)
    up_NH = _linear_per_expert(experts, inputs, weights.up_EHD, weights.up_bias_EH)
    hidden = weights.activate(up_NH).split_with_sizes(sizes)
    y_ND = _linear_per_expert(experts, hidden, weights.down_EDF, weights.down_bias_ED)
    return combine(y_ND, x_TD, token_ids_N, weights_N)


def _linear_per_expert(
    experts: Sequence[int], inputs: Sequence[Tensor], weight_EOI: Tensor, bias_EO: Tensor | None
) -> Tensor:
    weight_E, bias_E = weight_EOI, bias_EO
    if torch.is_grad_enabled():
        # Once: the gradient of `weight_EOI[expert]` is as large as all experts together.
        weight_E, bias_E = weight_EOI.unbind(), None if bias_EO is None else bias_EO.unbind()
    outputs = [
        F.linear(input_NI, weight_E[expert], None if bias_E is None else bias_E[expert])
        for expert, input_NI in zip(experts, inputs, strict=True)
    ]
    return torch.cat(outputs)
