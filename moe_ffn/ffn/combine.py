"""How a shared expert's output joins the routed one.

T tokens
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor, nn


class Combine(nn.Module, ABC):
    """Weights both; the block's output is the sum of the two."""

    @abstractmethod
    def forward(self, routed: Tensor, shared: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        """(routed, shared), each times its weight; all (..., d_model)."""


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


@torch.no_grad()
def share_of_norms(shared: Tensor, routed: Tensor, mask_T: Tensor | None) -> Tensor:
    """The mean over real tokens of |shared| / (|shared| + |routed|), both (..., d_model); see
    `Routing.shared_share`.
    """
    dtype = torch.promote_types(shared.dtype, torch.float32)
    shared_T, routed_T = (
        torch.linalg.vector_norm(value, dim=-1, dtype=dtype).flatten() for value in (shared, routed)
    )
    share_T = shared_T / (shared_T + routed_T).clamp(min=torch.finfo(shared_T.dtype).tiny)
    if mask_T is None:
        return share_T.sum() / max(len(share_T), 1)
    return share_T.masked_fill(~mask_T, 0).sum() / mask_T.sum().clamp(min=1)
