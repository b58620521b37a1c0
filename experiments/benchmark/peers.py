"""Layers of other libraries with our weights, one adapter each.

A peer is timed if its package is installed. If it rejects a shape (ValueError) or fails, the benchmark skips
it and prints the reason.

D model width, E experts, F hidden width
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from experiments.benchmark.shapes import Shape

SAME, REFERENCE = "same", "reference"
"""Relation of a layer's function to that of our `loop` backend."""


@dataclass(frozen=True)
class Weights:
    """Weights to load into a peer, laid out as in `nn.Linear`, (out, in)."""

    router_ED: Tensor
    gate_EFD: Tensor
    up_EFD: Tensor
    down_EDF: Tensor


@dataclass(frozen=True)
class Peer:
    """Layer of another library."""

    package: str
    build: Callable[[Weights, Shape], nn.Module]
    """Builds the layer, x (B, S, D) -> hidden or (hidden, more)."""
    gpu_only: bool = False

    @property
    def is_installed(self) -> bool:
        return importlib.util.find_spec(self.package) is not None


def mixtral(weights: Weights, shape: Shape, *, implementation: str) -> nn.Module:
    """Build the block of Mixtral: softmax over all experts, the k largest renormalised."""
    if shape.k == 1:
        raise ValueError("Mixtral's router always renormalises; with k = 1 all weights are 1")
    modeling = import_module("transformers.models.mixtral.modeling_mixtral")
    config = import_module("transformers").MixtralConfig(
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_local_experts=shape.num_experts,
        num_experts_per_tok=shape.k,
        experts_implementation=implementation,
    )
    with torch.device("meta"):
        block = modeling.MixtralSparseMoeBlock(config)
    values = {
        "gate.weight": weights.router_ED,
        "experts.gate_up_proj": torch.cat([weights.gate_EFD, weights.up_EFD], dim=1),
        "experts.down_proj": weights.down_EDF,
    }
    block.load_state_dict(values, assign=True)
    return block


class ScatterMoE(nn.Module):
    """Experts of ScatterMoE, which has no router, behind the router of Mixtral."""

    def __init__(self, weights: Weights, shape: Shape) -> None:
        super().__init__()
        self.k = shape.k
        self.router_ED = nn.Parameter(weights.router_ED.clone())
        mlp = import_module("scattermoe.mlp")
        self.experts = mlp.GLUMLP(
            input_size=shape.d_model,
            hidden_size=shape.d_ff,
            num_experts=shape.num_experts,
            top_k=shape.k,
            activation=nn.SiLU(),
        ).to(weights.down_EDF)
        # ScatterMoE activates the second half.
        up_gate = torch.cat([weights.up_EFD, weights.gate_EFD], dim=1)
        with torch.no_grad():
            self.experts.experts.weight.copy_(up_gate)
            self.experts.output_experts.weight.copy_(weights.down_EDF)

    def forward(self, x: Tensor) -> Tensor:
        return self.experts(x, *route(x, self.router_ED, self.k))


class StackedExperts(nn.Module):
    """Experts whose matrices are stacked, gate before up, behind the router of Mixtral."""

    def __init__(self, weights: Weights, shape: Shape) -> None:
        super().__init__()
        self.k = shape.k
        self.router_ED = nn.Parameter(weights.router_ED.clone())
        self.gate_up = nn.Parameter(torch.cat([weights.gate_EFD, weights.up_EFD], dim=1))
        self.down = nn.Parameter(weights.down_EDF.clone())


class Liger(StackedExperts):
    """Experts of Liger-Kernel, which has no router, behind the router of Mixtral."""

    def __init__(self, weights: Weights, shape: Shape) -> None:
        super().__init__(weights, shape)
        self.run = import_module("liger_kernel.ops").LigerFusedMoEFunction.apply

    def forward(self, x: Tensor) -> Tensor:
        weights_TK, expert_ids_TK = route(x, self.router_ED, self.k)
        x_TD = x.flatten(0, -2)
        return self.run(x_TD, self.gate_up, self.down, expert_ids_TK.int(), weights_TK).view_as(x)


class Unsloth(StackedExperts):
    """Grouped products of Unsloth, which gather and scatter rows, behind the router of Mixtral.

    Its tiles are fixed, because its autotuner compiles up to 108 tiles of each kernel.
    """

    def __init__(self, weights: Weights, shape: Shape) -> None:
        super().__init__(weights, shape)
        package = "unsloth.kernels.moe.grouped_gemm"
        self.product = import_module(f"{package}.interface").grouped_gemm
        self.find_rows = import_module(f"{package}.reference.moe_ops").get_routing_indices
        tuning = import_module(f"{package}.kernels.tuning")
        names = {"fwd": "Forward", "bwd_dX": "Backward_dX", "bwd_dW": "Backward_dW"}
        self.tiles = {
            f"kernel_config_{part}": getattr(tuning, f"KernelConfig{name}")(*UNSLOTH_TILES[part])
            for part, name in names.items()
        }

    def forward(self, x: Tensor) -> Tensor:
        weights_TK, expert_ids_TK = route(x, self.router_ED, self.k)
        counts_E, pair_ids_N = self.find_rows(expert_ids_TK, len(self.down))
        rows = {"m_sizes": counts_E, "gather_indices": pair_ids_N, "topk": self.k, **self.tiles}
        gate_up_NH = self.product(x.flatten(0, -2), self.gate_up, permute_x=True, **rows)
        gate_NF, up_NF = gate_up_NH.chunk(2, dim=-1)
        y_ND = self.product(
            F.silu(gate_NF) * up_NF, self.down, permute_y=True, is_first_gemm=False, **rows
        )
        y_TKD = y_ND.unflatten(0, weights_TK.shape)
        return (y_TKD * weights_TK[..., None]).sum(dim=1).view_as(x)


UNSLOTH_TILES = {
    "fwd": (128, 128, 64, 8, 4),
    "bwd_dX": (128, 64, 256, 8, 3),
    "bwd_dW": (64, 128, 256, 8, 3),
}
"""Rows, outputs and inputs of a tile, warps and stages, for each product."""


def route(x: Tensor, router_ED: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the weights and experts of Mixtral's router, (T, K) each."""
    scores_TE = F.linear(x, router_ED).flatten(0, -2).float().softmax(dim=-1)
    weights_TK, expert_ids_TK = scores_TE.topk(k, dim=-1)
    return (weights_TK / weights_TK.sum(dim=-1, keepdim=True)).to(x.dtype), expert_ids_TK


HF_EAGER, HF_GROUPED, HF_BATCHED = "HF eager", "HF grouped_mm", "HF batched_mm"

PEERS: dict[str, Peer] = {
    HF_EAGER: Peer("transformers", partial(mixtral, implementation="eager")),
    HF_GROUPED: Peer("transformers", partial(mixtral, implementation="grouped_mm")),
    HF_BATCHED: Peer("transformers", partial(mixtral, implementation="batched_mm")),
    "ScatterMoE": Peer("scattermoe", ScatterMoE, gpu_only=True),
    "Liger": Peer("liger_kernel", Liger, gpu_only=True),
    "Unsloth": Peer("unsloth", Unsloth, gpu_only=True),
}
"""Peers by name, in the order of the tables."""

TRAINING_PEERS = tuple(name for name in PEERS if name != HF_BATCHED)
"""Peers without batched_mm, which is for decoding: it copies an expert's weights for every pair."""


def hidden_of(output: Any) -> Tensor:
    """Return the hidden states in the output of any layer."""
    if isinstance(output, Tensor):
        return output
    return output[0] if isinstance(output, tuple) else output.hidden
