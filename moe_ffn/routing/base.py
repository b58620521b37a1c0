"""What every router is: (tokens, context) -> Routing.

T tokens, D model width, E experts
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ffn.initialization import init_linear_
from moe_ffn.outputs import Routing, TokenContext


class Router(nn.Module, ABC):
    """Chooses experts for tokens. Holds no counters: all it observed is in the `Routing` it returns."""

    @abstractmethod
    def forward(self, x_TD: Tensor, context: TokenContext) -> Routing:
        """Route flattened tokens; `context` is flattened too (`outputs.flatten_tokens`)."""


class RouterLinear(nn.Module):
    """The router's projection, computed in float32 whatever surrounds it.

    `x.float()` alone is not enough: autocast would lower the product again, and in bfloat16 two
    experts' logits often tie (Switch Transformer, section 2.4, "selective precision").
    """

    def __init__(self, d_model: int, num_experts: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num_experts, d_model))
        init_linear_(self.weight)

    def forward(self, x_TD: Tensor) -> Tensor:
        """Logits (T, E), float32 (float64 for a float64 layer)."""
        dtype = torch.float64 if x_TD.dtype == torch.float64 else torch.float32
        with torch.autocast(device_type=x_TD.device.type, enabled=False):
            return F.linear(x_TD.to(dtype), self.weight.to(dtype))
