"""How a shared expert's output joins the routed one."""

from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor, nn


class Combine(nn.Module, ABC):
    """(routed, shared, x) -> hidden, all (..., d_model)."""

    @abstractmethod
    def forward(self, routed: Tensor, shared: Tensor, x: Tensor) -> Tensor: ...


class Sum(Combine):
    def forward(self, routed: Tensor, shared: Tensor, x: Tensor) -> Tensor:
        return routed + shared


class SigmoidGate(Combine):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.gate = nn.Linear(d_model, 1, bias=False)

    def forward(self, routed: Tensor, shared: Tensor, x: Tensor) -> Tensor:
        return routed + self.gate(x).sigmoid().to(x.dtype) * shared


class Average(Combine):
    def __init__(self, experts_per_token: float) -> None:
        super().__init__()
        self.k = experts_per_token

    def forward(self, routed: Tensor, shared: Tensor, x: Tensor) -> Tensor:
        return (self.k * routed + shared) / (self.k + 1)


class Residual(Combine):
    def __init__(self, d_model: int) -> None:
        super().__init__()
        self.coefficient = nn.Linear(d_model, 2)

    def forward(self, routed: Tensor, shared: Tensor, x: Tensor) -> Tensor:
        share = self.coefficient(x).softmax(dim=-1).to(x.dtype)
        return share[..., :1] * routed + share[..., 1:] * shared
