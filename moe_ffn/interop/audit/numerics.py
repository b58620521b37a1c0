"""Checks of an audit on numbers: the precision of routers, and kernels compared with a loop in float64.

T tokens, D model width, E experts, K experts per token
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_ffn.experts.matrices import MatrixExperts
from moe_ffn.ffn.dispatch import plan_of_pairs
from moe_ffn.interop.audit.findings import KERNELS, PRECISION, Finding
from moe_ffn.interop.audit.layers import SparseLayer
from moe_ffn.interop.audit.probe import Probe, mode
from moe_ffn.interop.kernels import implementation_of, weights_of
from moe_ffn.interop.routings import is_experts
from moe_ffn.kernels.select import run_experts
from moe_ffn.metrics.functional import chosen_experts
from moe_ffn.outputs import PairsOnlyRouting, Plan, Routing, dtype_name

MAX_TOKENS = 256
"""Maximum number of tokens whose experts a check computes again, to stay quick."""

MAX_ERROR = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Dtype -> largest difference from float64, as a share of the largest value, that rounding explains."""

TF32_ERROR = 5e-3
"""Largest difference on a GPU in float32, whose products may use the ten-bit mantissa of TF32."""

MAX_FLIPS = 0.01
"""Largest acceptable share of tokens whose experts change with the precision of the router."""


@dataclass
class RecordedCalls:
    """Calls of the routers and experts of a layer in one forward pass."""

    routers: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = field(
        default_factory=list
    )
    """Module, inputs by position and by name, output."""
    experts: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any]]] = field(default_factory=list)


def record(probe: Probe) -> dict[str, RecordedCalls]:
    """Run the model once in evaluation, and record the inputs of its routers and experts."""
    recorded = {layer.name: RecordedCalls() for layer in probe.reached}

    def keep(calls: list[Any], *call: Any) -> None:
        calls.append(call)

    with mode(probe.model, training=False), torch.no_grad(), ExitStack() as hooks:
        for layer in probe.reached:
            calls = recorded[layer.name]
            for module in layer.router_modules:
                hook = partial(keep, calls.routers)
                hooks.enter_context(module.register_forward_hook(hook, with_kwargs=True))
            for module in layer.experts:
                if is_experts(module) or isinstance(module, MatrixExperts):
                    hook = partial(keep, calls.experts)
                    hooks.enter_context(module.register_forward_pre_hook(hook, with_kwargs=True))
        probe.run()
    return recorded


# -- routers


def check_precision(layer: SparseLayer, calls: RecordedCalls) -> Iterator[Finding]:
    """Compare the experts that a router chooses with those that it chooses in other precisions."""
    for router, args, kwargs, output in calls.routers:
        chosen = _chosen(output)
        if chosen is None or not any(True for _ in router.parameters()):
            continue  # a table of experts has no scores
        outputs = {
            dtype_name(dtype): _output_in(dtype, router, args, kwargs)
            for dtype in (torch.bfloat16, torch.float32, torch.float64)
        }
        flips = {
            name: share
            for name, other in outputs.items()
            if (share := _flips(chosen, _chosen(other))) is not None
        }
        if not flips:
            continue
        check = PRECISION.at(layer.name)
        # A router in bfloat16 makes scores equal that differ in float32.
        if (
            tied := _share_of_ties(outputs["float32"] if "float32" in flips else output)
        ) > MAX_FLIPS:
            yield check.warns(
                f"{tied:.0%} of the tokens have equal scores at the border between chosen and other experts",
                "the order of experts decides; look for a router that is zero, clamped or quantised",
            )
            continue
        measured = ", ".join(f"{share:.1%} in {name}" for name, share in flips.items())
        dtype = dtype_name(next(router.parameters()).dtype)
        in_float32 = flips.get("float32", 0.0)
        yield check.requires(
            flips.get("float64", in_float32) <= MAX_FLIPS,
            f"tokens whose experts change if the router is computed in another precision: {measured}",
            f"the router is in {dtype}; keep its weights and logits in float32"
            if in_float32 > MAX_FLIPS
            else "float32 cannot tell these scores apart; a router z-loss keeps logits small",
            otherwise="warn",
        )


def _chosen(output: Any) -> Tensor | None:
    """Return the chosen experts, bool (T, E), of our routing or of the tuple of a router of transformers."""
    if isinstance(output, PairsOnlyRouting) or not isinstance(output, tuple | Routing):
        return None
    if isinstance(output, Routing):
        return chosen_experts(output)
    tensors = [value for value in output if isinstance(value, Tensor)]
    ids = next((value for value in tensors if not value.is_floating_point()), None)
    if ids is None or ids is tensors[0] or ids.ndim != 2:  # masks, as in NLLB-MoE
        return None
    num_experts = output[0].shape[-1]
    chosen_TE = torch.zeros(len(ids), num_experts, dtype=torch.bool, device=ids.device)
    return chosen_TE.scatter_(1, ids.long(), value=True)


def _output_in(
    dtype: torch.dtype, router: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Return the output of a router that runs in `dtype`; None if it cannot."""
    try:
        other = copy.deepcopy(router).to(dtype)
        with torch.no_grad():
            return other(
                *(_in_dtype(value, dtype) for value in args),
                **{name: _in_dtype(value, dtype) for name, value in kwargs.items()},
            )
    except (RuntimeError, ValueError, TypeError):  # a router that fixes its dtype
        return None


def _flips(chosen_TE: Tensor, again_TE: Tensor | None) -> float | None:
    """Return the share of tokens with other experts; None if the choices cannot be compared."""
    if again_TE is None or again_TE.shape != chosen_TE.shape:
        return None
    return (again_TE != chosen_TE).any(dim=-1).double().mean().item()


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _share_of_ties(output: Any) -> float:
    """Return the share of tokens for which a chosen and another expert have equal logits."""
    logits_TE = output.logits_TE if isinstance(output, Routing) else output[0]
    chosen_TE = _chosen(output)
    if logits_TE is None or chosen_TE is None or logits_TE.shape != chosen_TE.shape:
        return 0.0
    chosen_T = logits_TE.masked_fill(~chosen_TE, torch.inf).amin(dim=-1)
    other_T = logits_TE.masked_fill(chosen_TE, -torch.inf).amax(dim=-1)
    return (chosen_T == other_T).double().mean().item()


# -- kernels


def check_kernels(layer: SparseLayer, calls: RecordedCalls) -> Iterator[Finding]:
    """Compare the experts' output and gradients with a loop over experts in float64."""
    if layer.kind == "listed":
        yield KERNELS.at(layer.name).skips("experts in a list are computed by their own modules")
        return
    if not calls.experts:
        yield KERNELS.at(layer.name).skips(
            "these experts do not receive ids and weights, or have no products"
        )
        return
    for module, args, kwargs in calls.experts:
        yield _compared(layer, module, (*args, *kwargs.values()))


def _compared(layer: SparseLayer, module: Any, args: tuple[Any, ...]) -> Finding:
    check = KERNELS.at(layer.name)
    parameter = next(module.parameters())
    if not parameter.is_floating_point():
        return check.skips("the weights of the experts are quantised")
    if isinstance(module, MatrixExperts):
        kernels = f"moe_ffn ({module.config.backend})"
    else:
        kernels = implementation_of(module)
    try:
        errors = _errors(module, args)
    except NotImplementedError as error:
        return check.skips(str(error))
    limit = MAX_ERROR.get(parameter.dtype, 3e-2)
    if parameter.is_cuda and parameter.dtype == torch.float32:
        limit = TF32_ERROR
    wrong = [name for name, error in errors.items() if not error <= limit]
    worst = max(errors, key=lambda name: math.inf if math.isnan(errors[name]) else errors[name])
    sentence = (
        f"{kernels} in {dtype_name(parameter.dtype)}, compared with a loop in float64: largest "
        f"difference {errors[worst]:.1e} of the largest value (in {worst})"
    )
    if not wrong:
        return check.passes(sentence)
    return check.fails(
        f"{sentence}; above {limit:.0e}: {', '.join(wrong)}",
        f"do not use {kernels} here; 'eager' of transformers and 'loop' of moe_ffn are plain loops",
    )


def _errors(module: Any, args: tuple[Any, ...]) -> dict[str, float]:
    """Return the relative error of the output and of each gradient. Experts are compared one by one, because
    a copy of a layer in float64 takes gigabytes.
    """
    x_TD, indices_N, ids_N, weights_N = _pairs(args)
    num_experts = next(module.parameters()).shape[0]

    def compute(x_TD: Tensor, weights_N: Tensor) -> Tensor:
        if isinstance(module, MatrixExperts):
            plan = plan_of_pairs(indices_N, ids_N, weights_N, num_experts)
            return run_experts(x_TD, plan, module.weights(), module.config.backend)
        size = (len(x_TD), -1)
        return module(x_TD, ids_N.view(size), weights_N.view(size))

    found = _results(compute, (x_TD, weights_N), dict(module.named_parameters()))
    sums = {name: torch.zeros_like(found[name], dtype=torch.float64) for name in _INPUTS}
    # The largest difference, and the largest value.
    largest = {name: x_TD.new_zeros(2, dtype=torch.float64) for name in found}

    def compare(name: str, found: Tensor, expected: Tensor) -> None:
        pair = torch.stack([(found.double() - expected).abs().max(), expected.double().abs().max()])
        largest[name] = torch.maximum(largest[name], pair)

    for expert in range(num_experts):
        own_N = (ids_N == expert).nonzero().flatten()
        expected: dict[str, Tensor] = {}
        if len(own_N):
            expected = _of_expert(module, expert, x_TD, indices_N[own_N], weights_N[own_N])
            sums["output"] += expected["output"]
            sums["gradient of the tokens"] += expected["gradient of the tokens"]
            sums["gradient of the weights"][own_N] = expected["gradient of the weights"]
        for name in found.keys() - sums.keys():
            compare(name, found[name][expert], expected.get(name, found[name].new_zeros(1)))
    for name, total in sums.items():
        compare(name, found[name], total)
    return {name: float(error / size.clamp(1e-30)) for name, (error, size) in largest.items()}


_INPUTS = ("output", "gradient of the tokens", "gradient of the weights")


def _pairs(args: tuple[Any, ...]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the first tokens, and the token, the expert and the weight of each of their pairs."""
    x_TD, plan = args[:2]
    if isinstance(plan, Plan):
        counts_E = plan.offsets_E.diff(prepend=plan.offsets_E.new_zeros(1))
        ids_N = torch.arange(len(counts_E), device=x_TD.device).repeat_interleave(counts_E)
        indices_N, weights_N = plan.token_indices_N[: len(ids_N)], plan.weights_N[: len(ids_N)]
    else:
        ids_N, weights_N = (value.flatten() for value in args[1:3])
        indices_N = torch.arange(len(x_TD), device=x_TD.device)
        indices_N = indices_N.repeat_interleave(len(ids_N) // len(x_TD))
    few_N = indices_N < MAX_TOKENS
    return x_TD[:MAX_TOKENS], indices_N[few_N], ids_N[few_N], weights_N[few_N]


def _of_expert(
    module: Any, expert: int, x_TD: Tensor, indices_N: Tensor, weights_N: Tensor
) -> dict[str, Tensor]:
    """Return the results of one expert in float64, with the other experts left out."""
    alone = copy.copy(module)
    parameters = {
        name: nn.Parameter(parameter.detach()[expert : expert + 1].double())
        for name, parameter in module.named_parameters()
    }
    vars(alone)["_parameters"] = {**vars(module)["_parameters"], **parameters}

    def compute(x_TD: Tensor, weights_N: Tensor) -> Tensor:
        plan = plan_of_pairs(indices_N, torch.zeros_like(indices_N), weights_N, 1)
        weights = alone.weights() if isinstance(alone, MatrixExperts) else weights_of(alone)
        return run_experts(x_TD, plan, weights, "loop")

    return _results(compute, (x_TD.double(), weights_N.double()), parameters)


def _results(
    compute: Callable[[Tensor, Tensor], Tensor],
    inputs: tuple[Tensor, Tensor],
    parameters: dict[str, nn.Parameter],
) -> dict[str, Tensor]:
    """Return the output and all gradients, for a fixed gradient of the output."""
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    required = [parameter.requires_grad for parameter in parameters.values()]
    targets = [*leaves, *parameters.values()]
    try:
        for target in targets:
            target.requires_grad_(True)
        with torch.enable_grad():
            output = compute(*leaves)
        if output.requires_grad:
            generator = torch.Generator().manual_seed(0)
            direction = torch.randn(output.shape, generator=generator, dtype=torch.float64)
            grads = torch.autograd.grad(
                output, targets, direction.to(output), allow_unused=True, materialize_grads=True
            )
        else:
            grads = [torch.zeros_like(target) for target in targets]
    finally:
        for parameter, was_required in zip(parameters.values(), required, strict=True):
            parameter.requires_grad_(was_required)
    names = (*_INPUTS[1:], *(f"gradient of {name}" for name in parameters))
    return {"output": output.detach(), **dict(zip(names, grads, strict=True))}
