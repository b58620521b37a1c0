"""Our kernels as an implementation of experts in transformers.

    moe_ffn.interop.register()
    model = AutoModelForCausalLM.from_pretrained(folder, experts_implementation="moe_ffn")

T tokens, D model width, E experts, K experts per token, F hidden width, H = 2 F gated or F plain
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from moe_ffn.config.errors import import_optional
from moe_ffn.ffn.base import layer_name
from moe_ffn.ffn.dispatch import plan_of_pairs
from moe_ffn.interop.routings import is_experts, layer_of
from moe_ffn.kernels.activations import (
    ACTIVATIONS,
    Activation,
    ClampedGate,
    ClampedSwiGLU,
    GateFunction,
)
from moe_ffn.kernels.base import ExpertWeights
from moe_ffn.kernels.select import run_experts

log = logging.getLogger(__name__)

NEED_TRANSFORMERS = "transformers 5 or newer is not installed"

NAME = "moe_ffn"
"""The name of our kernels among transformers' implementations of experts."""

_GATE = "_moe_ffn_gate"
"""Attribute of an experts module in which we cache its activation and gate."""


def register() -> None:
    """Register our kernels as `experts_implementation="moe_ffn"`.

    It works for every model whose experts select an implementation by name: at loading, or later by
    `model.set_experts_implementation("moe_ffn")`. Other models accept the name and ignore it, so check with
    `kernels_in_use`. A saved model does not record the name; give it again at every loading.

    Raises:
        ConfigError: transformers is not installed.
    """
    moe = import_optional("transformers.integrations.moe", NEED_TRANSFORMERS)
    moe.ALL_EXPERTS_FUNCTIONS.register(NAME, run)


_OWN_EXPERTS = re.compile("(Experts|MoE|Moe|MoA)$")
"""Class names of experts, or of layers with experts, that do not select an implementation by name."""


def kernels_in_use(model: nn.Module) -> dict[str, str]:
    """Return layer (`layer_03`) -> implementation of its experts, such as `moe_ffn`, `grouped_mm` or `eager`.

    Layers whose experts ignore `experts_implementation`, as in Llama 4, JetMoe and Doge, use `eager`. If the
    model was told to use `moe_ffn` and a layer does not, this logs a warning.
    """
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        if (number := layer_of(path)) is None:
            continue
        if is_experts(module):
            found[layer_name(number)] = implementation_of(module)
        elif _OWN_EXPERTS.search(type(module).__name__):
            found.setdefault(layer_name(number), "eager")
    found = dict(sorted(found.items()))
    others = [layer for layer, name in found.items() if name != NAME]
    asked = getattr(getattr(model, "config", None), "_experts_implementation", None)
    if asked == NAME and others:
        log.warning(
            "experts_implementation is '%s', but %d of %d sparse layers of %s ignore it (%s)",
            *(NAME, len(others), len(found), type(model).__name__, others[0]),
        )
    return found


def implementation_of(experts: Any) -> str:
    """Return the name of the implementation that transformers runs a module of experts on."""
    return getattr(experts.config, "_experts_implementation", None) or "eager"


def run(
    experts: Any,
    hidden_TD: Tensor,
    expert_ids_TK: Tensor,
    weights_TK: Tensor,
    backend: str = "auto",
) -> Tensor:
    """Return the output, (T, D), of an experts module of transformers, whose class is decorated by
    `use_experts_implementation`. Ids >= E, from expert parallelism, are not computed. NotImplementedError,
    with the reason, if our kernels do not compute this class.
    """
    num_tokens, k = expert_ids_TK.shape
    num_experts = int(experts.num_experts)
    token_indices_T = torch.arange(num_tokens, device=hidden_TD.device)
    plan = plan_of_pairs(
        token_indices_T.repeat_interleave(k),
        expert_ids_TK.reshape(-1).clamp(max=num_experts),
        weights_TK.reshape(-1),
        num_experts,
    )
    return run_experts(hidden_TD, plan, weights_of(experts), backend)


def weights_of(experts: Any) -> ExpertWeights:
    """Return the weights of an experts module, as views if possible; for errors see `run`."""
    if experts.has_post_expert_norm:
        raise _unsupported(experts, "a norm after each expert")
    gated, has_bias = bool(experts.has_gate), bool(experts.has_bias)
    name = "gate_up_proj" if gated else "up_proj"
    up_EHD, down_EDF = getattr(experts, name), experts.down_proj
    up_bias_EH = getattr(experts, f"{name}_bias") if has_bias else None
    down_bias_ED = experts.down_proj_bias if has_bias else None
    if experts.is_transposed:
        up_EHD, down_EDF = up_EHD.transpose(1, 2), down_EDF.transpose(1, 2)
    activation, gate_function = _gate_of(experts)
    weights = ExpertWeights(
        activation=activation,
        up_EHD=up_EHD,
        down_EDF=down_EDF,
        gated=gated,
        up_bias_EH=up_bias_EH,
        down_bias_ED=down_bias_ED,
        gate_function=gate_function,
        interleaved=gated and not experts.is_concatenated,
    ).with_adapters_of(experts)
    # `triton` needs this copy in training; in generation, with few tokens, it would take most of the time.
    if weights.interleaved and up_EHD.is_cuda and torch.is_grad_enabled():
        return _with_gate_first(weights)
    return weights


def _with_gate_first(weights: ExpertWeights) -> ExpertWeights:
    """Return a copy of interleaved weights whose rows of the gate come first."""
    names = ("up_EHD", "up_bias_EH", "up_b_EHR")
    rows = {name: getattr(weights, name) for name in names}
    copies = {
        name: torch.cat([value[:, ::2], value[:, 1::2]], dim=1)
        for name, value in rows.items()
        if value is not None
    }
    return replace(weights, interleaved=False, **copies)


def _gate_of(experts: Any) -> tuple[Activation, GateFunction | None]:
    """Return our activation or gate function that computes the same as the module."""
    if _GATE not in experts.__dict__:
        experts.__dict__[_GATE] = _find_gate(experts)
    return experts.__dict__[_GATE]


@torch.no_grad()
def _find_gate(experts: Any) -> tuple[Activation, GateFunction | None]:
    if not experts.has_gate:
        if (activation := activation_of(experts.act_fn)) is not None:
            return activation, None
        raise _unsupported(experts, f"the activation {experts.act_fn}")
    clamped_gates = list(_clamped_gates(experts))
    probe = _probe(max([12.0, *(1.5 * clamped.limit for clamped in clamped_gates)]))
    gate, up = (values.flatten() for values in torch.meshgrid(probe, probe, indexing="ij"))
    both = (
        torch.cat([gate, up]) if experts.is_concatenated else torch.stack([gate, up], -1).flatten()
    )
    out = experts._apply_gate(both[None])[0]
    for name, activation in ACTIVATIONS.items():
        if _is_close(out, activation(gate) * up):
            return name, None
    for clamped in clamped_gates:
        if _is_close(out, clamped(gate, up)):
            return "silu", clamped
    raise _unsupported(experts, "a custom gate")


def _clamped_gates(experts: Any) -> Iterator[ClampedSwiGLU | ClampedGate]:
    """Yield the clamped gates that the numeric attributes of the module may describe."""
    for prefix in ("", "swiglu_"):
        alpha, limit = (getattr(experts, prefix + name, None) for name in ("alpha", "limit"))
        if limit is not None and math.isfinite(limit):
            numbers = {"alpha": 1.0 if alpha is None else float(alpha), "limit": float(limit)}
            yield ClampedSwiGLU(**numbers)
            yield ClampedGate(**numbers, added=0.0, after=False)
            yield ClampedGate(**numbers, added=0.0, after=True)


@torch.no_grad()
def activation_of(function: Callable[[Tensor], Tensor]) -> Activation | None:
    """Return our activation that computes the same as `function`; None if there is none."""
    out = function(_probe())
    for name, ours in ACTIVATIONS.items():
        if _is_close(out, ours(_probe())):
            return name
    return None


def _probe(limit: float = 12.0) -> Tensor:
    """Return inputs from -limit to limit, at which functions are compared."""
    return torch.linspace(-limit, limit, 97, dtype=torch.float32)


def _is_close(found: Tensor, expected: Tensor) -> bool:
    return found.shape == expected.shape and torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


def _unsupported(experts: nn.Module, feature: str) -> NotImplementedError:
    return NotImplementedError(
        f"moe_ffn does not compute {type(experts).__name__}, which has {feature}; use another "
        "experts_implementation for this model"
    )
