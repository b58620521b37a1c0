"""Sharding of a decoder over a mesh of ranks, with FSDP2 and DTensor."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from moe_ffn.experts.base import Experts
from moe_ffn.ffn.dispatch import Dispatcher
from moe_ffn.model.decoder import Decoder, DecoderLayer
from moe_ffn.training.parallel.dispatcher import AllToAllDispatcher
from moe_ffn.training.parallel.layout import Layout


class Sharder:
    """Shards the weights of a decoder over a mesh of ranks, in place: first each layer, then the rest.

    Every rank builds the same layers and keeps its part. A layer can be sharded before the next one is built,
    so that a rank never holds more than one complete layer.

    The backward pass sums gradients over ranks without dividing: experts are on fewer ranks than other
    weights, so no common divisor is right. The loss of a rank must therefore be the sum over its own tokens,
    divided by the number of tokens of all ranks.
    """

    def __init__(self, layout: Layout, device: str) -> None:
        """Make the meshes for the ranks of the current process group, on `cpu` or `cuda`."""
        # Routings contain views, but no code changes them in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        num_shards = layout.shard * layout.expert
        names = ("data", "shard", "expert")
        mesh = init_device_mesh(
            device, (layout.data, layout.shard, layout.expert), mesh_dim_names=names
        )
        self._dense_mesh = init_device_mesh(
            device, (layout.data, num_shards), mesh_dim_names=names[:2]
        )
        self._expert_mesh = mesh["data", "shard"]
        if layout.data == 1:  # otherwise gradients would be reduced over groups of one rank
            self._dense_mesh, self._expert_mesh = self._dense_mesh["shard"], mesh["shard"]
        self.layout, self._mesh = layout, mesh
        self._sharded: set[nn.Parameter] = set()

    def shard_layer(self, layer: nn.Module) -> None:
        """Shard a block of a decoder."""
        if self.layout.expert > 1:
            cast("DecoderLayer", layer).ffn.place_experts(self._place_experts)
        self._shard(layer)

    def shard_rest(self, decoder: Decoder) -> None:
        """Shard the parameters outside of blocks, after `shard_layer` of every block."""
        self._shard(decoder)
        for module in decoder.modules():
            if isinstance(module, FSDPModule):
                module.set_gradient_divide_factor(1.0)
                # Otherwise gloo rejects the factor, and NCCL multiplies by it before the sum.
                module.set_force_sum_reduction_for_comms(True)

    def _shard(self, module: nn.Module) -> None:
        fully_shard(module, mesh=self._dense_mesh, ignored_params=self._sharded)

    def _place_experts(self, experts: Experts, num_experts: int) -> Dispatcher:
        layout = self.layout
        _shard_experts(experts, self._mesh["expert"])
        if layout.data * layout.shard > 1:
            # Axis 0 counts experts, axis 1 the rows of each expert.
            axis = Shard(1 if layout.shards_each_expert(num_experts) else 0)
            fully_shard(experts, mesh=self._expert_mesh, shard_placement_fn=lambda _: axis)
        else:
            # They are on this rank only, so FSDP ignores them.
            self._sharded.update(experts.parameters())
        return AllToAllDispatcher(num_experts, self._mesh.get_group("expert"))


def _shard_experts(experts: Experts, mesh: DeviceMesh) -> None:
    """Keep only this rank's experts in parameters whose first axis counts experts."""
    for module in experts.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            # Every rank has the same complete parameter, so nothing is sent.
            part = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            setattr(module, name, nn.Parameter(part, requires_grad=parameter.requires_grad))


def total_norm(gradients: Iterable[Tensor]) -> Tensor:
    """Return the Euclidean norm of all gradients, which may be on different meshes; equal on all ranks."""
    norms = [full_tensor(torch.nn.utils.get_total_norm(group)) for group in _by_mesh(gradients)]
    if len(norms) == 1:  # squaring a single norm might overflow
        return norms[0]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.zeros(())


def clip_by_norm_(parameters: Iterable[nn.Parameter], max_norm: float, norm: Tensor) -> None:
    """Scale gradients with total norm `norm` down to `max_norm`, like `clip_grad_norm_`."""
    for group in _by_mesh(parameters):
        torch.nn.utils.clip_grads_with_norm_(group, max_norm, norm)


def _by_mesh(tensors: Iterable[Tensor]) -> Iterable[list[Tensor]]:
    """Group tensors by mesh, as torch's functions require; tensors without a mesh are one group."""
    groups: dict[DeviceMesh | None, list[Tensor]] = {}
    for tensor in tensors:
        mesh = tensor.device_mesh if isinstance(tensor, DTensor) else None
        groups.setdefault(mesh, []).append(tensor)
    return groups.values()


def full_tensor(tensor: Tensor) -> Tensor:
    """Gather a DTensor, for which every rank must call this; return any other tensor unchanged."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def shard_like(value: Any, parameter: Tensor) -> Any:
    """Shard an optimizer state, equal on every rank, like `parameter`; keep one of another shape."""
    if not isinstance(parameter, DTensor) or not isinstance(value, Tensor):
        return value
    if value.shape != parameter.shape:
        return value
    mesh, placements = parameter.device_mesh, parameter.placements
    return distribute_tensor(value.to(parameter.device), mesh, placements, src_data_rank=None)


def empty_shard_like(value: Any, parameter: Tensor) -> Any:
    """Return an empty tensor for an optimizer state on the meta device; return any other value unchanged.

    The tensor is sharded like the parameter. If its shape differs, it is complete and on the CPU.
    """
    if not isinstance(value, Tensor) or not value.is_meta:
        return value
    if value.shape == parameter.shape:
        return torch.empty_like(parameter, dtype=value.dtype)
    return torch.empty_like(value, device="cpu")


def on_whole_matrices(
    function: Callable[[Tensor], Tensor], part: Tensor, parameter: Tensor
) -> Tensor:
    """Apply a function of whole matrices to this rank's part of a sharded tensor; return such a part."""
    assert isinstance(parameter, DTensor)
    mesh, placements = parameter.device_mesh, parameter.placements
    splits_matrices = any(isinstance(place, Shard) and place.dim > 0 for place in placements)
    if parameter.ndim > 2 and not splits_matrices:  # sharding only divides the experts
        return function(part)
    sharded = DTensor.from_local(
        part, mesh, placements, run_check=False, shape=parameter.shape, stride=parameter.stride()
    )
    result = function(sharded.full_tensor())
    return distribute_tensor(result, mesh, placements, src_data_rank=None).to_local()
