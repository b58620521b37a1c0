"""The one signature of the experts' arithmetic.

T tokens, D model width, E experts, F hidden width, N (token, expert) pairs
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_ffn.activations import Activation, ClampedSwiGLU, activation_function
from moe_ffn.dispatch.plan import Plan


@dataclass(frozen=True)
class ExpertWeights:
    """E parallel MLPs: down(act(up x)), or down(act(gate x) * up x) where there is a gate.

    Matrices are laid out as in `nn.Linear`, (out, in). Absent biases are None.
    """

    activation: Activation
    up_EFD: Tensor
    down_EDF: Tensor
    gate_EFD: Tensor | None = None
    up_bias_EF: Tensor | None = None
    gate_bias_EF: Tensor | None = None
    down_bias_ED: Tensor | None = None
    dropout: float = 0.0
    """Probability of zeroing an activated hidden unit; 0 in evaluation."""
    clamped: ClampedSwiGLU | None = None
    """Stands for the product of activated gate and up, where experts have a gate of this kind."""

    @property
    def num_experts(self) -> int:
        return self.up_EFD.shape[0]

    def activate(self, up: Tensor, gate: Tensor | None) -> Tensor:
        """The hidden units from the first product or products."""
        act = activation_function(self.activation)
        if gate is None:
            hidden = act(up)
        elif self.clamped is not None:
            hidden = self.clamped(gate, up)
        else:
            hidden = act(gate) * up
        return F.dropout(hidden, self.dropout) if self.dropout else hidden


Backend = Callable[[Tensor, Plan, ExpertWeights], Tensor]
"""(x_TD, plan, weights) -> y_TD: gather, multiply, weight and add up; y has the dtype of x."""


def combine(y_ND: Tensor, x_TD: Tensor, plan: Plan) -> Tensor:
    """Weight each pair's result and add it to its token, in at least float32."""
    weighted_ND = y_ND * plan.weights_N.unsqueeze(-1)
    sums_TD = torch.zeros(x_TD.shape, dtype=weighted_ND.dtype, device=x_TD.device)
    return sums_TD.index_add(0, plan.token_ids_N, weighted_ND).to(x_TD.dtype)
