"""Rules that add the output of a shared expert to the output of the routed experts.

T tokens
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Literal

import torch
from pydantic import Field
from torch import Tensor, nn

from moe_ffn.config.base import MAX_COUNT, TaggedConfig
from moe_ffn.config.sizes import linear_flops, linear_params


class CombineConfig(TaggedConfig, frozen=True):
    """Rule that adds the shared expert's output to the routed output."""

    @abstractmethod
    def build(self, d_model: int, experts_per_token: float) -> Combine:
        """Return a module that weights both outputs."""

    def num_params(self, d_model: int) -> int:
        return 0

    def flops_per_token(self, d_model: int) -> int:
        """Return the forward FLOPs of the matrix products for one token."""
        return 0

    def with_fixed_weights(self, experts_per_token: float) -> CombineConfig:
        """Return a config that keeps the current weights if `experts_per_token` changes."""
        return self


class SumConfig(CombineConfig, frozen=True):
    """routed + shared (DeepSeekMoE, arXiv:2401.06066)."""

    type: Literal["sum"] = "sum"

    def build(self, d_model: int, experts_per_token: float) -> Combine:
        return Sum()


class SigmoidGateConfig(CombineConfig, frozen=True):
    """routed + sigmoid(w x) * shared (Qwen2-MoE, arXiv:2407.10671)."""

    type: Literal["sigmoid_gate"] = "sigmoid_gate"

    def num_params(self, d_model: int) -> int:
        return d_model

    def flops_per_token(self, d_model: int) -> int:
        return linear_flops(d_model, 1)

    def build(self, d_model: int, experts_per_token: float) -> Combine:
        return SigmoidGate(d_model)


class AverageConfig(CombineConfig, frozen=True):
    """(k * routed + shared) / (k + 1): the shared expert counts as one more expert (OLMo-core)."""

    type: Literal["average"] = "average"
    k: float | None = Field(default=None, gt=0, le=MAX_COUNT)
    """Weight of the routed output: by default the number of experts per token; 1 in Cohere 2."""

    def build(self, d_model: int, experts_per_token: float) -> Combine:
        return Average(experts_per_token if self.k is None else self.k)

    def with_fixed_weights(self, experts_per_token: float) -> CombineConfig:
        return self.model_copy(update={"k": self.k or experts_per_token})


class ResidualConfig(CombineConfig, frozen=True):
    """c_1 * routed + c_2 * shared, c = softmax(W x + b): residual MoE (PR-MoE, arXiv:2201.05596)."""

    type: Literal["residual"] = "residual"

    def num_params(self, d_model: int) -> int:
        return linear_params(d_model, 2, bias=True)

    def flops_per_token(self, d_model: int) -> int:
        return linear_flops(d_model, 2)

    def build(self, d_model: int, experts_per_token: float) -> Combine:
        return Residual(d_model)


class Combine(nn.Module, ABC):
    """Weights the routed and the shared output, which the block then adds."""

    @abstractmethod
    def forward(self, routed: Tensor, shared: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return (routed, shared), each multiplied by its weight; all are (..., d_model)."""


class Sum(Combine):
    def forward(self, routed: Tensor, shared: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return routed, shared


class SigmoidGate(Combine):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, 1, bias=False)

    def forward(self, routed: Tensor, shared: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return routed, self.gate(x).sigmoid().to(x.dtype) * shared


class Average(Combine):
    def __init__(self, experts_per_token: float) -> None:
        super().__init__()
        self.k = experts_per_token

    def forward(self, routed: Tensor, shared: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.k * routed / (self.k + 1), shared / (self.k + 1)

    def extra_repr(self) -> str:
        return f"experts_per_token={self.k:g}"


class Residual(Combine):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.coefficient = nn.Linear(d_model, 2)

    def forward(self, routed: Tensor, shared: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        share = self.coefficient(x).softmax(dim=-1).to(x.dtype)
        return share[..., :1] * routed, share[..., 1:] * shared


def share_of_norms(shared: Tensor, routed: Tensor, mask: Tensor | None) -> Tensor:
    """Return the shared expert's fraction of the output, a scalar in [0, 1], without gradient.

    It is the mean over real tokens of |shared| / (|shared| + |routed|), with Euclidean norms of the weighted
    outputs, (..., d_model). It is 0 if no token is real.
    """
    dtype = torch.promote_types(shared.dtype, torch.float32)
    # Not `no_grad`: torch.export makes it a subgraph, and cannot load a subgraph with an unused result.
    shared_T, routed_T = (
        torch.linalg.vector_norm(value.detach(), dim=-1, dtype=dtype).flatten()
        for value in (shared, routed)
    )
    share_T = shared_T / (shared_T + routed_T).clamp(min=torch.finfo(shared_T.dtype).tiny)
    if mask is None:
        return share_T.sum() / max(share_T.shape[0], 1)
    return share_T.masked_fill(~mask.flatten(), 0).sum() / mask.sum().clamp(min=1)
