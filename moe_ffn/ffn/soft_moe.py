"""Soft MoE, a mixture without a router.

B sequences, S tokens per sequence, D model width, E experts, P slots of all experts
"""

from __future__ import annotations

from typing import Literal

import torch
import torch.nn.functional as F
from einops import einsum, rearrange
from pydantic import Field
from torch import Tensor, nn

from moe_ffn.config.base import MAX_COUNT
from moe_ffn.config.errors import Unsupported, UseCase
from moe_ffn.config.sizes import linear_flops
from moe_ffn.experts.base import ExpertsConfig, without_adapters
from moe_ffn.experts.matrices import GatedExpertsConfig
from moe_ffn.ffn.base import ExpertStack, FFNBlock, FFNConfig, check_input, flatten_tokens
from moe_ffn.kernels.base import is_transform_on, reject_vmap, without_autocast
from moe_ffn.outputs import FFNOutput, Plan, TokenContext


class SoftMoEConfig(FFNConfig, frozen=True):
    """Soft MoE: experts process slots, which are weighted means of all tokens of a sequence.

    Puigcerver et al. 2023 (arXiv:2308.00951). Every token reaches every expert, so there is no routing.
    """

    type: Literal["soft_moe"] = "soft_moe"
    num_experts: int = Field(default=8, ge=1, le=MAX_COUNT)
    """E, the number of experts."""
    slots_per_expert: int = Field(default=32, ge=1, le=MAX_COUNT)
    """Slots per expert and sequence. With as many slots as tokens, the experts cost as much as with top-1
    routing."""
    experts: ExpertsConfig = GatedExpertsConfig()
    """Kind of network of each expert; by default each is as wide as the dense block."""

    def unsupported(self, use_case: UseCase) -> Unsupported | None:
        if use_case.causal or use_case.cached:
            return Unsupported(
                "type 'soft_moe' mixes all tokens of a sequence",
                "use 'moe' with router.type 'top_k'",
            )
        if use_case.num_ranks > 1:
            return Unsupported(
                "type 'soft_moe' sends every token to every expert", "set parallel.expert to 1"
            )
        return super().unsupported(use_case)

    @property
    def expert_stack(self) -> ExpertStack:
        return ExpertStack(self.experts, self.num_experts, experts_per_token=1)

    @property
    def num_slots(self) -> int:
        return self.num_experts * self.slots_per_expert

    def build(self, d_model: int) -> FFNBlock:
        return SoftMoEFFN(self, d_model)

    def num_params(self, d_model: int) -> int:
        return self.expert_stack.num_params(d_model) + d_model * self.num_slots + 1

    def flops_per_token(self, d_model: int, seq_len: int) -> int:
        # Three products of tokens and slots: the logits, the means into slots and the means out of slots.
        mixing = 3 * linear_flops(d_model, self.num_slots)
        slots = self.num_slots / seq_len
        wrapper = round(slots * self.experts.wrapper_flops_per_token(d_model))
        return mixing + wrapper + self.expert_stack.flops_per_token(d_model, slots, slots)

    def describe(self) -> str:
        return (
            f"{self.type}, {self.num_experts} experts ({self.experts.type}), {self.num_slots} slots"
        )


class SoftMoEFFN(FFNBlock):
    """Slots are softmax-weighted means of tokens; outputs are softmax-weighted means of the experts' outputs.

    Puigcerver et al. 2023 (arXiv:2308.00951), equations 1 to 3, with the normalisation of section 2.3:
    tokens and slot parameters have unit length, and a learned scale multiplies the logits.
    """

    def __init__(self, config: SoftMoEConfig, d_model: int) -> None:
        super().__init__()
        self.config = config
        self.d_model = d_model
        self.num_experts = config.num_experts
        self.slots_per_expert = config.slots_per_expert
        self.experts = config.expert_stack.build(d_model)
        self.slots_PD = nn.Parameter(torch.empty(config.num_slots, d_model))
        self.scale = nn.Parameter(torch.ones(1))
        nn.init.normal_(self.slots_PD)

    def forward(self, x: Tensor, context: TokenContext | None = None) -> FFNOutput:
        check_input(x, context, self.d_model, self)
        if is_transform_on():
            reject_vmap(x, self.parameters())
        x_TD, flat = flatten_tokens(x, context)
        length = max(flat.sequence_length or 1, 1)
        x_BSD = rearrange(x_TD, "(b s) d -> b s d", s=length)
        logits_BSP = self.logits(x_BSD)
        dtype = logits_BSP.dtype
        # Slots exclude padding and tokens with NaN or infinity, which would spread to every slot.
        mask_BS1 = torch.ones_like(x_BSD[..., :1], dtype=torch.bool)
        if flat.mask is not None:
            mask_BS1 = rearrange(flat.mask, "(b s) -> b s 1", s=length)
        included_BS1 = mask_BS1 & x_BSD.isfinite().all(dim=-1, keepdim=True)
        # Not -inf: in a sequence of only padding, the softmax would be NaN.
        lowest = torch.finfo(dtype).min
        dispatch_BSP = logits_BSP.masked_fill(~included_BS1, lowest).softmax(dim=1) * included_BS1
        included_BSD = x_BSD.to(dtype).masked_fill(~included_BS1, 0)
        slots_BPD = einsum(dispatch_BSP, included_BSD, "b s p, b s d -> b p d")
        y_BPD = self.run_experts(slots_BPD.to(x.dtype))
        combine_BSP = logits_BSP.softmax(dim=-1) * mask_BS1
        hidden = einsum(combine_BSP, y_BPD.to(dtype), "b s p, b p d -> b s d")
        return FFNOutput(hidden.to(x.dtype).reshape(x.shape))

    def extra_repr(self) -> str:
        slots = f"slots_per_expert={self.slots_per_expert}"
        return f"num_experts={self.num_experts}, {slots}, d_model={self.d_model}"

    def logits(self, x_BSD: Tensor) -> Tensor:
        """Return a logit for each token and slot, (B, S, P), float32 or wider."""
        dtype = torch.float64 if x_BSD.dtype == torch.float64 else torch.float32
        with without_autocast(x_BSD):
            slots_PD = self.scale.to(dtype) * F.normalize(self.slots_PD.to(dtype), dim=-1)
            return F.linear(F.normalize(x_BSD.to(dtype), dim=-1), slots_PD)

    def run_experts(self, slots_BPD: Tensor) -> Tensor:
        """Run each expert on its slots of every sequence; return (B, P, D)."""
        device, num_experts, p = slots_BPD.device, self.num_experts, self.slots_per_expert
        num_rows = slots_BPD.shape[0] * p  # of one expert
        slots_ND = rearrange(slots_BPD, "b (e p) d -> (e b p) d", p=p)
        ends_E = torch.arange(1, num_experts + 1, device=device) * num_rows
        ids_N = torch.arange(num_experts * num_rows, device=device)
        weights_N = torch.ones(num_experts * num_rows, device=device)
        plan = Plan(ids_N, weights_N, ends_E.to(torch.int32), ids_N)
        experts = without_adapters(self.experts)
        y_ND = experts.after_combine(self.experts(experts.before_dispatch(slots_ND), plan))
        return rearrange(y_ND, "(e b p) d -> b (e p) d", e=num_experts, p=p)
