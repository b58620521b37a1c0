"""Muon for stacked matrices, with AdamW for all that is no hidden matrix.

`torch.optim.Muon` takes two-dimensional parameters alone, each one matrix. Here experts are stacked, and gate
stands above up, so that one parameter holds many matrices, of which each is made orthogonal by itself.

M matrices, O rows (out), I columns (in)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import Any, Literal

import torch
from einops import rearrange
from pydantic import Field, model_validator
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.adamw import adamw

from moe_ffn.training.optimizer import (
    MAX_RATE,
    Betas,
    DecoupledDecay,
    OptimizerConfig,
    Rate,
    require_below_one,
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
    momentum: float = Field(default=0.95, ge=0, lt=1)
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

    @model_validator(mode="after")
    def _check_betas(self) -> MuonConfig:
        require_below_one("adamw_betas", self.adamw_betas)
        return self

    def build(self, model: nn.Module) -> Optimizer:
        return Muon(muon_groups(model, self))


def muon_groups(model: nn.Module, config: MuonConfig) -> list[dict[str, Any]]:
    """Hidden matrices for Muon, by how many are fused; other matrices, and what has no decay, for AdamW."""
    decayed, kept = split_by_decay(model)
    hidden = {name: p for name, p in decayed.items() if name.startswith(LAYERS)}
    others = [p for name, p in decayed.items() if name not in hidden]
    by_muon = {
        "lr": config.learning_rate,
        "weight_decay": config.weight_decay,
        "momentum": config.momentum,
        "nesterov": config.nesterov,
        "ns_steps": config.ns_steps,
        "adjust_lr_fn": config.adjust_lr_fn,
    }
    by_adamw = {
        "lr": config.adamw_learning_rate or config.learning_rate,
        "betas": config.adamw_betas,
        "eps": config.adamw_eps,
    }
    return [
        *[
            {**by_muon, "params": params, "num_fused": num_fused}
            for num_fused, params in _by_num_fused(hidden).items()
        ],
        {**by_adamw, "params": others, "weight_decay": config.weight_decay},
        {**by_adamw, "params": list(kept.values()), "weight_decay": 0.0},
    ]


def _by_num_fused(hidden: dict[str, nn.Parameter]) -> dict[int, list[nn.Parameter]]:
    groups: dict[int, list[nn.Parameter]] = {1: []}
    for name, parameter in hidden.items():
        found = [FUSED[part] for part in name.split(".") if part in FUSED]
        groups.setdefault(found[0] if found else 1, []).append(parameter)
    return groups


class Muon(Optimizer):
    """Muon (Jordan et al. 2024) in groups that have `num_fused`, AdamW in the others.

    Both are those of `torch.optim`. A parameter (..., num_fused * O, I) holds matrices (O, I).
    """

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups, {})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            with_grad = [p for p in group["params"] if p.grad is not None]
            if any(p.grad.is_sparse for p in with_grad):
                raise RuntimeError("Muon does not support sparse gradients; leave sparse=True out")
            if "num_fused" in group:
                for parameter in with_grad:
                    self._step_muon(parameter, group)
            elif with_grad:
                self._step_adamw(with_grad, group)
        return loss

    def _step_muon(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient, momentum = self.state[parameter], parameter.grad, group["momentum"]
        assert gradient is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = gradient.lerp(buffer, momentum) if group["nesterov"] else buffer
        matrices_MOI = rearrange(update, "... (m o) i -> (... m) o i", m=group["num_fused"])
        orthogonal_MOI = orthogonalize(matrices_MOI, group["ns_steps"])
        rate = group["lr"] * _rate_factor(group["adjust_lr_fn"], *orthogonal_MOI.shape[-2:])
        parameter.mul_(1 - group["lr"] * group["weight_decay"])
        parameter.add_(orthogonal_MOI.reshape(parameter.shape), alpha=-rate)

    def _step_adamw(self, parameters: list[Tensor], group: dict[str, Any]) -> None:
        states = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                state["step"] = torch.tensor(0.0)
                state["exp_avg"] = torch.zeros_like(parameter)
                state["exp_avg_sq"] = torch.zeros_like(parameter)
        beta1, beta2 = group["betas"]
        adamw(
            parameters,
            [parameter.grad for parameter in parameters if parameter.grad is not None],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            [state["step"] for state in states],
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
        )


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


def _rate_factor(adjust_lr_fn: str, num_rows: int, num_columns: int) -> float:
    if adjust_lr_fn == "original":
        return math.sqrt(max(1, num_rows / num_columns))
    return 0.2 * math.sqrt(max(num_rows, num_columns))
