"""The sparse layers of a live model: experts, routers and adapters, of our blocks and of other libraries.

E experts, D model width, F hidden width
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from moe_ffn.config.errors import ConfigError
from moe_ffn.experts.base import Experts, without_adapters
from moe_ffn.ffn.base import FFNBlock, layer_name
from moe_ffn.interop.routings import is_experts, layer_of

Kind = Literal["moe_ffn", "fused", "listed"]
"""Our block; experts as one module with stacked tensors; or a list of one module for each expert."""

_SHARED = re.compile(r"shared", re.IGNORECASE)
_EXPERTS = re.compile(r"(^|_)experts$|Experts$")
_ROUTER = re.compile(r"^gate$|router", re.IGNORECASE)


@dataclass(frozen=True)
class ExpertTensor:
    """A parameter of the experts: of all experts of the layer, or of one."""

    name: str
    """Name in the model."""
    parameter: nn.Parameter
    expert: int | None = None
    """Index of the expert in a list of experts; None if the parameter stacks all experts."""

    @property
    def adapter(self) -> Literal["", "A", "B"]:
        """The matrix of a low-rank adapter that this is; empty for a weight of the experts."""
        return "A" if ".lora_A." in self.name else "B" if ".lora_B." in self.name else ""

    def by_expert(self, value: Tensor, num_experts: int) -> Tensor:
        """Return a value of the parameter's shape with one row for each expert, (E, ...) or (1, ...)."""
        if self.expert is not None:
            return value.reshape(1, -1)
        if self.adapter == "A":  # peft: (E r, in)
            return value.reshape(num_experts, -1)
        if self.adapter == "B":  # peft: (out, r E)
            return value.reshape(value.shape[0], -1, num_experts).movedim(2, 0).flatten(1)
        return value[:num_experts].flatten(1)


@dataclass(frozen=True)
class SparseLayer:
    """The experts and routers of one layer."""

    name: str
    """`layer_03`, or the path if another layer has the same number"""
    path: str
    """Path of the block in the model."""
    kind: Kind
    block: nn.Module
    """Holds the router and the experts."""
    experts: tuple[nn.Module, ...]
    """Modules with the weights of the experts, without their adapters."""
    num_experts: int
    """E, experts with weights."""
    weights: tuple[ExpertTensor, ...]
    adapters: tuple[ExpertTensor, ...]
    router_modules: tuple[nn.Module, ...]
    routers: dict[str, nn.Parameter]
    """Parameters of the routers, by their names in the model."""
    shared: dict[str, nn.Parameter]
    """Parameters of the shared experts."""

    @property
    def parameters(self) -> dict[str, nn.Parameter]:
        """Parameters of experts, adapters, routers and shared experts, by their names in the model."""
        tensors = {tensor.name: tensor.parameter for tensor in (*self.weights, *self.adapters)}
        return {**tensors, **self.routers, **self.shared}

    @property
    def num_parameters(self) -> int:
        """Number of parameters of the experts, without adapters."""
        return sum(weight.parameter.numel() for weight in self.weights)


def without_parallel_wrappers(model: Any) -> nn.Module:
    """Return the model inside DistributedDataParallel, DataParallel and `torch.compile`."""
    if type(model).__name__ in ("DistributedDataParallel", "DataParallel"):
        return without_parallel_wrappers(model.module)
    return without_parallel_wrappers(model._orig_mod) if hasattr(model, "_orig_mod") else model


def without_peft(model: nn.Module) -> nn.Module:
    """Return the model inside peft."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model  # pyright: ignore[reportCallIssue]


def sparse_layers(model: nn.Module) -> list[SparseLayer]:
    """Find the sparse layers, in the order of the model; ConfigError if there are none."""
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    found: dict[str, list[str]] = {}
    inside: list[str] = []
    for path, module in model.named_modules():
        if any(path.startswith(f"{outer}.") for outer in inside):
            continue
        if isinstance(module, FFNBlock) and module.routers():
            found[path] = []
        elif _is_experts(path, module):
            found.setdefault(path.rpartition(".")[0], []).append(path)
        else:
            continue
        inside.append(path)
    layers = [_layer(model, path, paths, names) for path, paths in found.items()]
    uses = Counter(layer.name for layer in layers)
    layers = [
        layer if uses[layer.name] == 1 else replace(layer, name=layer.path) for layer in layers
    ]
    if not layers:
        raise ConfigError(
            f"{type(without_peft(model)).__name__} has no sparse layer: none of our blocks, and no module of "
            "experts; audit a mixture of experts"
        )
    return layers


def _is_experts(path: str, module: nn.Module) -> bool:
    """Return True for a module of experts, perhaps wrapped by adapters, but not for shared experts."""
    name = path.rpartition(".")[2]
    if _SHARED.search(name):
        return False
    base = without_adapters(module)
    if is_experts(base):
        return True
    if not (_EXPERTS.search(name) or _EXPERTS.search(type(base).__name__)):
        return False
    if isinstance(base, nn.ModuleList | nn.ModuleDict):
        return len(listed(base)) > 1
    return any(parameter.ndim == 3 for parameter in base.parameters())


def listed(experts: nn.Module) -> list[nn.Module]:
    """Return the experts of a list, which may also contain a dropout, as in NLLB-MoE."""
    return [part for part in experts.children() if any(True for _ in part.parameters())]


def _layer(
    model: nn.Module, path: str, expert_paths: list[str], names: dict[int, str]
) -> SparseLayer:
    block = model.get_submodule(path)
    number = layer_of(path)
    wrapped = [model.get_submodule(expert_path) for expert_path in expert_paths]
    if isinstance(block, FFNBlock):
        kind: Kind = "moe_ffn"
        parts = [part for part in block.modules() if isinstance(part, Experts)]
        bases: list[nn.Module] = [*dict.fromkeys(part.innermost for part in parts)]
        wrapped = [
            part
            for part in block.modules()
            if hasattr(part, "base_layer") and isinstance(without_adapters(part), Experts)
        ] or bases
        num_experts = int(getattr(block, "num_experts", 0)) or _leading_size(bases)
    else:
        bases = [*map(without_adapters, wrapped)]
        is_list = isinstance(bases[0], nn.ModuleList | nn.ModuleDict)
        kind = "listed" if is_list else "fused"
        num_experts = len(listed(bases[0])) if is_list else _leading_size(bases)
    experts = [*_tensors(kind, wrapped, bases, num_experts, names)]
    routers = _router_modules(block, wrapped, num_experts)
    return SparseLayer(
        name=path if number is None else layer_name(number),
        path=path,
        kind=kind,
        block=block,
        experts=tuple(bases),
        num_experts=num_experts,
        weights=tuple(tensor for tensor in experts if not tensor.adapter),
        adapters=tuple(tensor for tensor in experts if tensor.adapter),
        router_modules=tuple(routers),
        routers={names[id(p)]: p for router in routers for p in router.parameters()},
        shared={
            names[id(parameter)]: parameter
            for place in (block, model.get_submodule(path.rpartition(".")[0]))
            for name, part in place.named_children()
            if _SHARED.search(name)
            for parameter in part.parameters()
        },
    )


def _leading_size(modules: Iterable[nn.Module]) -> int:
    """Return E, the first size that stacked matrices share; LongCat-Flash stacks further rows in some."""
    parameters = [p for module in modules for p in module.parameters()]
    stacked = [p for p in parameters if p.ndim == 3] or [p for p in parameters if p.ndim == 2]
    return min((int(p.shape[0]) for p in stacked), default=0)


def _tensors(
    kind: Kind,
    wrapped: list[nn.Module],
    bases: list[nn.Module],
    num_experts: int,
    names: dict[int, str],
) -> Iterator[ExpertTensor]:
    if kind == "listed":
        for base in bases:
            for expert, module in enumerate(listed(base)):
                for parameter in module.parameters():
                    yield ExpertTensor(names[id(parameter)], parameter, expert)
        return
    weights = {id(p): p for base in bases for p in base.parameters()}
    for identity, parameter in weights.items():
        size = parameter.shape[0] if parameter.ndim in (2, 3) else 0
        if size == num_experts or (parameter.ndim == 3 and size > num_experts):
            yield ExpertTensor(names[identity], parameter)
    for parameter in dict.fromkeys(p for module in wrapped for p in module.parameters()):
        tensor = ExpertTensor(names[id(parameter)], parameter)
        if tensor.adapter:
            yield tensor


def _router_modules(
    block: nn.Module, wrapped: list[nn.Module], num_experts: int
) -> list[nn.Module]:
    """Return the routers; in other libraries, they are recognised by their name or by one row per expert."""
    if isinstance(block, FFNBlock):
        return [*block.routers().values()]
    return [
        child
        for name, child in block.named_children()
        if child not in wrapped
        and not _SHARED.search(name)
        and (
            _ROUTER.search(name)
            or [p.shape[0] for p in child.parameters() if p.ndim == 2] == [num_experts]
        )
    ]
