"""Muon for stacked matrices, with AdamW for all that is no hidden matrix.

`torch.optim.Muon` takes two-dimensional parameters alone, each one matrix. Here experts are stacked, and gate
stands above up, so that one parameter holds many matrices, of which each is made orthogonal by itself.

M matrices, O rows (out), I columns (in)
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal

import torch
from einops import rearrange
from pydantic import Field
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from moe_ffn.training.optimizer import (
    MAX_RATE,
    Betas,
    DecoupledDecay,
    Fraction,
    OptimizerConfig,
    Rate,
    split_by_decay,
)

LAYERS = "layers."
"""What the names of a decoder's hidden parameters begin with."""

FUSED = {"gate_up": 2}
"""Names of parameters, or of the layers they are the weight of, with as many matrices one above the other."""

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_EPS = 1e-7


class MuonConfig(OptimizerConfig, frozen=True):
    """Orthogonalised momentum for the matrices of the layers, AdamW for all else (Jordan et al. 2024).

    Every expert's matrix is one of its own, and so are gate and up. All else is embeddings, an untied output
    matrix, norms and biases.
    """

    type: Literal["muon"] = "muon"
    learning_rate: Rate = 1e-2
    """The full rate, before the schedule, and for AdamW's part too."""
    weight_decay: DecoupledDecay = 0.1
    momentum: Fraction = 0.95
    """Decay of the running mean of the gradients."""
    nesterov: bool = True
    """Look ahead along the momentum."""
    ns_steps: int = Field(default=5, ge=1, lt=100)
    """Newton-Schulz iterations that make a matrix orthogonal."""
    adjust_lr_fn: Literal["match_rms_adamw", "original"] = "match_rms_adamw"
    """The rate of a matrix (out, in): times 0.2 sqrt(max(out, in)), as large as a step of AdamW (Moonlight,
    arXiv:2502.16982), or times sqrt(max(1, out / in)), for rates such as 0.02."""
    adamw_learning_rate: float | None = Field(default=None, gt=0, le=MAX_RATE)
    """The full rate of what AdamW moves; null: learning_rate."""
    adamw_betas: Betas = (0.9, 0.95)
    """AdamW's decay of the running mean and of the running square."""
    adamw_eps: float = Field(default=1e-8, gt=0)
    """Added to AdamW's denominator."""

    def build(self, model: nn.Module) -> Optimizer:
        decayed, kept = split_by_decay(model)
        by_num_fused: dict[int, list[nn.Parameter]] = {1: []}
        others: list[nn.Parameter] = []
        for name, parameter in decayed.items():
            if name.startswith(LAYERS):
                num_fused = max(FUSED.get(part, 1) for part in name.split("."))
                by_num_fused.setdefault(num_fused, []).append(parameter)
            else:
                others.append(parameter)
        own = {"momentum", "nesterov", "ns_steps", "adjust_lr_fn"}
        by_muon = {"lr": self.learning_rate, "weight_decay": self.weight_decay}
        by_muon |= self.model_dump(include=own)
        return Muon(
            [
                *(
                    {**by_muon, "num_fused": num_fused, "params": matrices}
                    for num_fused, matrices in by_num_fused.items()
                ),
                {"params": others, "weight_decay": self.weight_decay},
                {"params": list(kept.values()), "weight_decay": 0.0},
            ],
            lr=self.adamw_learning_rate or self.learning_rate,
            betas=self.adamw_betas,
            eps=self.adamw_eps,
        )


class Muon(AdamW):
    """Muon (Jordan et al. 2024) in groups that have `num_fused`, AdamW in the others.

    Both are those of `torch.optim`. A parameter (..., num_fused * O, I) holds matrices (O, I).
    """

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        groups = self.param_groups
        for group in groups:
            for parameter in group["params"] if "num_fused" in group else ():
                if parameter.grad is not None:
                    self._step_matrices(parameter, parameter.grad, group)
        try:
            self.param_groups = [group for group in groups if "num_fused" not in group]
            super().step()
        finally:
            self.param_groups = groups
        return loss

    def __setstate__(self, state: dict[str, Any]) -> None:
        Optimizer.__setstate__(self, state)  # Adam's asks every state for a step count

    def _step_matrices(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state, momentum = self.state[parameter], group["momentum"]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        matrices_MOI = rearrange(update, "... (m o) i -> (... m) o i", m=group["num_fused"])
        num_rows, num_columns = matrices_MOI.shape[-2:]
        if group["adjust_lr_fn"] == "original":
            factor = math.sqrt(max(1, num_rows / num_columns))
        else:
            factor = 0.2 * math.sqrt(max(num_rows, num_columns))
        orthogonal_MOI = orthogonalize(matrices_MOI, group["ns_steps"])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(orthogonal_MOI.reshape(parameter.shape), alpha=-group["lr"] * factor)


def orthogonalize(matrices_MOI: Tensor, num_steps: int) -> Tensor:
    """bfloat16 (M, O, I): each matrix with its singular values brought near 1, and a zero one as it is.

    The quintic Newton-Schulz iteration of `torch.optim.Muon`, in bfloat16 as there, of all at once.
    """
    a, b, c = _COEFFICIENTS
    is_tall = matrices_MOI.shape[-2] > matrices_MOI.shape[-1]
    x = matrices_MOI.bfloat16()
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=_EPS)
    for _ in range(num_steps):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if is_tall else x
