"""LoRA of peft on stacked experts, without the adapted weights of all experts.

    model = get_peft_model(model, LoraConfig(target_parameters=["experts.gate_up", "experts.down"]))
    fuse_adapters(model)

peft adapts a stacked parameter by `ParamWrapper`, which computes W + B A of all experts in each forward pass.
The backward pass then computes the gradient of all adapted weights. `fuse_adapters` gives these wrappers a
subclass that hands A and B to our kernels instead. The kernels compute W x + B (A x) for the rows of each
expert, on both sides of the activation, and gradients of A, B and x only.

Everything else stays peft's: the parameters and their names, merging, saving, switching and disabling.
Several active adapters are one adapter whose rank is the sum of their ranks.

E experts, I input width, O output width, R rank
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from peft.tuners.lora import layer as peft_layer
from torch import Tensor, nn

from moe_ffn.config.errors import ConfigError
from moe_ffn.experts.matrices import MatrixExperts
from moe_ffn.interop.kernels import NAME, implementation_of
from moe_ffn.interop.routings import is_experts
from moe_ffn.kernels.base import ADAPTERS

_FACTORS = {
    **dict.fromkeys(("up", "up_proj", "gate_up", "gate_up_proj"), ("up_a_ERD", "up_b_EHR")),
    **dict.fromkeys(("down", "down_proj"), ("down_a_ERF", "down_b_EDR")),
}
"""Name of a parameter of experts -> names of its factors in `ExpertWeights`."""

Model = TypeVar("Model", bound=nn.Module)


def fuse_adapters(model: Model) -> Model:
    """Let our kernels compute the LoRA adapters of a model's experts; return the same model.

    Call it after `get_peft_model` or `PeftModel.from_pretrained`. Adapters that you add later are computed
    in the same way. Outputs and gradients are those of peft, up to rounding.

    Args:
        model: a model of peft, of our own layers or of transformers with `experts_implementation="moe_ffn"`.

    Raises:
        ConfigError: the model has no stacked experts, or transformers runs adapted experts on other kernels.
    """
    experts = {name: module for name, module in model.named_modules() if _is_experts(module)}
    if not experts:
        raise ConfigError(
            "the model has no experts with stacked matrices, so there is nothing to adapt"
        )
    adapted = set[nn.Module]()
    for wrapper in model.modules():
        if not isinstance(wrapper, peft_layer.ParamWrapper):
            continue
        base: Any = wrapper.get_base_layer()
        if wrapper.parameter_name not in _FACTORS or not _is_experts(base):
            continue
        if not _runs_our_kernels(base):
            raise ConfigError(
                f"transformers runs {type(base).__name__} on '{implementation_of(base)}'; call "
                f"moe_ffn.interop.register() and model.set_experts_implementation('{NAME}') first"
            )
        wrapper.__class__ = ParamWrapper
        adapted.add(base)
    missing = {name: module for name, module in experts.items() if module not in adapted}
    if missing:
        name, first = next(iter(missing.items()))
        name = name.removeprefix("base_model.model.")
        place = name.rpartition(".")[2]
        parameters = [f"{place}.{own}" for own, _ in first.named_parameters() if own in _FACTORS]
        warnings.warn(
            f"{len(missing)} of {len(experts)} layers have experts without an adapter, of which the first is "
            f"{name}; add target_parameters={parameters} to LoraConfig to adapt them",
            stacklevel=2,
        )
    return model


class ParamWrapper(peft_layer.ParamWrapper):
    """peft's wrapper of a stacked parameter, recognised by its name; our kernels multiply its factors."""

    @contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        experts: Any = self.get_base_layer()
        adapters = [name for name in active_adapters if name in self.lora_A]
        # Experts that are rounded round W + B A, of which the kernels would round W alone.
        is_rounded = "before_products" in vars(experts)
        if not adapters or is_rounded or not _runs_our_kernels(experts):
            with super()._activate_lora(active_adapters):
                yield
            return
        before = getattr(experts, ADAPTERS, {})
        factors = zip(_FACTORS[self.parameter_name], self._factors(adapters), strict=True)
        setattr(experts, ADAPTERS, {**before, **dict(factors)})
        try:
            yield
        finally:
            setattr(experts, ADAPTERS, before)

    def _factors(self, adapters: list[str]) -> tuple[Tensor, Tensor]:
        """Return A (E, R, I), which includes the scale, and B (E, O, R)."""
        dtype = self.get_param().dtype
        all_a, all_b = list[Tensor](), list[Tensor]()
        for name in adapters:
            layers: Any = self.lora_A[name], self.lora_B[name]
            a, b = (layer.weight.to(dtype) for layer in layers)
            all_a.append(a.reshape(self.num_experts, -1, a.shape[-1]) * self.scaling[name])
            # Two axes, because torch transposes them faster than it permutes three.
            b_EX = b.reshape(-1, self.num_experts).t().contiguous()
            all_b.append(b_EX.unflatten(1, (b.shape[0], -1)))
        if len(adapters) == 1:
            return all_a[0], all_b[0]
        return torch.cat(all_a, dim=1), torch.cat(all_b, dim=2)


def _is_experts(module: nn.Module) -> bool:
    """Return True for experts whose computation we know: ours, or those that transformers lets us replace."""
    return isinstance(module, MatrixExperts) or is_experts(module)


def _runs_our_kernels(experts: Any) -> bool:
    return isinstance(experts, MatrixExperts) or implementation_of(experts) == NAME
