"""Expert by expert, with ordinary matrix products: any device, any dtype, autocast included.

T tokens, D model width, E experts, N (token, expert) pairs, O out, I in
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ffn.dispatch.plan import Plan
from moe_ffn.kernels.base import ExpertWeights, combine


def loop(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    """One gather, three products per expert, one scatter. Reads the offsets on the host.

    An expert without tokens multiplies an empty slice: it costs nothing and keeps its gradient a
    zero instead of a missing one, on which DDP and FSDP would hang.
    """
    if torch.compiler.is_compiling():
        # Its shapes are the experts' loads: it would be compiled anew at every step. Said here and
        # not as a decorator, which would load torch's compiler for everybody, in about a second.
        return torch.compiler.disable(_loop)(x_TD, plan, weights)  # pyright: ignore[reportCallIssue]
    return _loop(x_TD, plan, weights)


def _loop(x_TD: Tensor, plan: Plan, weights: ExpertWeights) -> Tensor:
    ends = plan.offsets_E.tolist()
    sizes = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    # Without the tail that nobody computes: of ReLU or top-p routing it may be most of the list.
    token_ids_N, weights_N = plan.token_ids_N[: ends[-1]], plan.weights_N[: ends[-1]]
    inputs = list(x_TD.index_select(0, token_ids_N).split(sizes))
    up_E = _linear_per_expert(inputs, weights.up_EHD, weights.up_bias_EH)
    hidden_E = [weights.activate(up_NH) for up_NH in up_E]
    outputs = _linear_per_expert(hidden_E, weights.down_EDF, weights.down_bias_ED)
    return combine(torch.cat(outputs), x_TD, token_ids_N, weights_N)


def _linear_per_expert(
    inputs: list[Tensor], weight_EOI: Tensor, bias_EO: Tensor | None
) -> list[Tensor]:
    biases = [None] * len(inputs) if bias_EO is None else bias_EO.unbind()
    parts = zip(inputs, weight_EOI.unbind(), biases, strict=True)
    return [F.linear(x, weight, bias) for x, weight, bias in parts]
