"""Checks of an audit on numbers: the precision of routers, and kernels compared with a loop in float64.

T tokens, D model width, E experts, K experts per token
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_ffn.experts.matrices import MatrixExperts
from moe_ffn.interop.audit.findings import KERNELS, PRECISION, Finding
from moe_ffn.interop.audit.layers import SparseLayer
from moe_ffn.interop.audit.probe import Probe, mode
from moe_ffn.interop.routings import is_experts
from moe_ffn.interop.transformers import implementation_of
from moe_ffn.interop.transformers import run as run_on_our_kernels
from moe_ffn.kernels.select import run_experts
from moe_ffn.metrics.functional import chosen_experts
from moe_ffn.outputs import Plan, Routing, dtype_name

MAX_TOKENS = 256
"""Tokens whose experts are computed again, so that a check stays quick."""

MAX_ERROR = {torch.float64: 1e-9, torch.float32: 1e-4, torch.float16: 5e-3, torch.bfloat16: 3e-2}
"""Dtype -> largest difference from float64, as a share of the largest value, that rounding explains."""

TF32_ERROR = 5e-3
"""The same on a GPU in float32, whose products may have the ten bits of TF32."""

MAX_FLIPS = 0.01
"""Share of tokens whose experts may change with the precision of the router."""


@dataclass
class Recorded:
    """Calls of the routers and experts of a layer in one forward pass."""

    routers: list[tuple[nn.Module, tuple[Any, ...], dict[str, Any], Any]] = field(
        default_factory=list
    )
    """Module, inputs by position and by name, output."""
    experts: list[tuple[nn.Module, tuple[Any, ...]]] = field(default_factory=list)


def record(probe: Probe) -> dict[str, Recorded]:
    """Run the model once in evaluation, and record the inputs of its routers and experts."""
    recorded = {layer.name: Recorded() for layer in probe.reached}

    def after_router(
        calls: Recorded, module: nn.Module, args: Any, kwargs: Any, output: Any
    ) -> None:
        if isinstance(output, tuple | Routing):
            calls.routers.append((module, args, kwargs, output))

    def before_experts(calls: Recorded, module: nn.Module, args: Any, kwargs: Any) -> None:
        calls.experts.append((module, (*args, *kwargs.values())))

    with mode(probe.model, training=False), torch.no_grad(), ExitStack() as hooks:
        for layer in probe.reached:
            calls = recorded[layer.name]
            for module in _routers(layer):
                hook = partial(after_router, calls)
                hooks.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            for module in layer.experts:
                if is_experts(module) or isinstance(module, MatrixExperts):
                    hook = partial(before_experts, calls)
                    hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
        probe.run()
    return recorded


def _routers(layer: SparseLayer) -> list[nn.Module]:
    if layer.kind == "moe_ffn":
        return list(layer.block.routers().values())  # pyright: ignore[reportCallIssue]
    paths = {name.rpartition(".")[0].removeprefix(f"{layer.path}.") for name in layer.routers}
    children = {path.partition(".")[0] for path in paths}
    return [child for name, child in layer.block.named_children() if name in children]


# -- routers


def check_precision(layer: SparseLayer, calls: Recorded) -> Iterator[Finding]:
    """Compare the experts that a router chooses with those that it chooses in other precisions."""
    for router, args, kwargs, output in calls.routers:
        chosen = _chosen(output)
        if chosen is None or not any(True for _ in router.parameters()):
            continue  # a table of experts has no scores
        dtype = next((p.dtype for p in router.parameters()), torch.float32)
        flips = {
            name: _flips(chosen, router, args, kwargs, other)
            for name, other in (
                ("bfloat16", torch.bfloat16),
                ("float32", torch.float32),
                ("float64", torch.float64),
            )
        }
        measured = ", ".join(
            f"{share:.1%} in {name}" for name, share in flips.items() if share is not None
        )
        if not measured:
            continue
        tied = _tied(output)
        exact = flips["float64"] if flips["float64"] is not None else flips["float32"]
        sentence = f"tokens whose experts change if the router is computed in another precision: {measured}"
        if tied > MAX_FLIPS:
            yield PRECISION.at(layer.name).warns(
                f"{tied:.0%} of the tokens have equal scores at the border between chosen and other experts",
                "the order of experts decides; look for a router that is zero, clamped or quantised",
            )
        elif exact is not None and exact > MAX_FLIPS:
            yield PRECISION.at(layer.name).warns(
                sentence,
                f"the router is in {dtype_name(dtype)}; keep its weights and logits in float32"
                if (flips["float32"] or 0) > MAX_FLIPS
                else "float32 cannot tell these scores apart; a router z-loss keeps logits small",
            )
        else:
            yield PRECISION.at(layer.name).passes(sentence)


def _chosen(output: Any) -> Tensor | None:
    """Return the chosen experts, bool (T, E), of our routing or of the tuple of a router of transformers."""
    if isinstance(output, Routing):
        return None if output.is_pairs_only else chosen_experts(output)
    ids = next((v for v in output if isinstance(v, Tensor) and not v.is_floating_point()), None)
    if ids is None or not isinstance(output[0], Tensor) or ids.ndim != 2:
        return None
    num_experts = output[0].shape[-1]
    chosen_TE = torch.zeros(len(ids), num_experts, dtype=torch.bool, device=ids.device)
    return chosen_TE.scatter_(1, ids.long(), value=True)


def _flips(
    chosen_TE: Tensor,
    router: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    dtype: torch.dtype,
) -> float | None:
    """Return the share of tokens with other experts when the router runs in `dtype`; None if it cannot."""
    try:
        other = copy.deepcopy(router).to(dtype)
        with torch.no_grad():
            output = other(
                *(_in_dtype(value, dtype) for value in args),
                **{name: _in_dtype(value, dtype) for name, value in kwargs.items()},
            )
    except (RuntimeError, ValueError, TypeError):  # a router that fixes its dtype
        return None
    again_TE = _chosen(output)
    if again_TE is None or again_TE.shape != chosen_TE.shape:
        return None
    return (again_TE != chosen_TE).any(dim=-1).double().mean().item()


def _in_dtype(value: Any, dtype: torch.dtype) -> Any:
    return value.to(dtype) if isinstance(value, Tensor) and value.is_floating_point() else value


def _tied(output: Any) -> float:
    """Return the share of tokens for which a chosen and another expert have equal logits."""
    logits_TE = output.logits_TE if isinstance(output, Routing) else output[0]
    chosen_TE = _chosen(output)
    if logits_TE is None or chosen_TE is None or logits_TE.shape != chosen_TE.shape:
        return 0.0
    chosen_T = logits_TE.masked_fill(~chosen_TE, torch.inf).amin(dim=-1)
    other_T = logits_TE.masked_fill(chosen_TE, -torch.inf).amax(dim=-1)
    return (chosen_T == other_T).double().mean().item()


# -- kernels


def check_kernels(layer: SparseLayer, calls: Recorded) -> Iterator[Finding]:
    """Compare the experts' output and gradients with a loop over experts in float64."""
    if layer.kind == "listed":
        yield KERNELS.at(layer.name).skips("experts in a list are computed by their own modules")
        return
    if not calls.experts:
        yield KERNELS.at(layer.name).skips(
            "these experts do not receive ids and weights, or have no products"
        )
        return
    for module, args in calls.experts:
        compare = _compare_ours if isinstance(module, MatrixExperts) else _compare_theirs
        yield _compared(layer, module, partial(compare, module, args), _name(module))


def _name(module: nn.Module) -> str:
    if isinstance(module, MatrixExperts):
        return f"moe_ffn ({module.config.backend})"
    return implementation_of(module)


def _compared(
    layer: SparseLayer,
    module: nn.Module,
    compare: Callable[[], dict[str, float]],
    implementation: str,
) -> Finding:
    parameter = next(module.parameters())
    if not parameter.is_floating_point():
        return KERNELS.at(layer.name).skips("the weights of the experts are quantised")
    try:
        errors = compare()
    except NotImplementedError as error:
        return KERNELS.at(layer.name).skips(str(error))
    limit = MAX_ERROR.get(parameter.dtype, 3e-2)
    if parameter.is_cuda and parameter.dtype == torch.float32:
        limit = TF32_ERROR
    worst = max(errors, key=lambda name: _sortable(errors[name]))
    sentence = (
        f"{implementation} in {dtype_name(parameter.dtype)}, compared with a loop in float64: largest "
        f"difference {errors[worst]:.1e} of the largest value (in {worst})"
    )
    if errors[worst] <= limit:
        return KERNELS.at(layer.name).passes(sentence)
    wrong = [name for name, error in errors.items() if not error <= limit]
    return KERNELS.at(layer.name).fails(
        f"{sentence}; above {limit:.0e}: {', '.join(wrong)}",
        f"do not use {implementation} here; 'eager' of transformers and 'loop' of moe_ffn are plain loops",
    )


def _sortable(error: float) -> float:
    return error if error == error else float("inf")


def _compare_ours(module: MatrixExperts, args: tuple[Any, ...]) -> dict[str, float]:
    x_TD, plan = args[:2]

    def run(experts: MatrixExperts, x_TD: Tensor, weights_N: Tensor, backend: str) -> Tensor:
        own_plan = Plan(plan.token_indices_N, weights_N, plan.offsets_E, plan.pair_ids_N)
        return run_experts(x_TD, own_plan, experts.weights(), backend)

    exact = copy.deepcopy(module).double()
    return _errors(
        partial(run, module, backend=module.config.backend),
        partial(run, exact, backend="loop"),
        module,
        exact,
        (x_TD, plan.weights_N),
    )


def _compare_theirs(module: Any, args: tuple[Any, ...]) -> dict[str, float]:
    hidden_TD, ids_TK, weights_TK = (value[:MAX_TOKENS] for value in args[:3])
    exact = copy.deepcopy(module).double()

    def theirs(hidden_TD: Tensor, weights_TK: Tensor) -> Tensor:
        return module(hidden_TD, ids_TK, weights_TK)

    def loop(hidden_TD: Tensor, weights_TK: Tensor) -> Tensor:
        return run_on_our_kernels(exact, hidden_TD, ids_TK, weights_TK, "loop")

    return _errors(theirs, loop, module, exact, (hidden_TD, weights_TK))


def _errors(
    fast: Callable[[Tensor, Tensor], Tensor],
    exact: Callable[[Tensor, Tensor], Tensor],
    module: nn.Module,
    exact_module: nn.Module,
    inputs: tuple[Tensor, Tensor],
) -> dict[str, float]:
    """Return the relative error of the output, and of the gradient of each input and parameter."""
    found = _results(fast, inputs, module)
    expected = _results(exact, tuple(value.double() for value in inputs), exact_module)
    return {name: _error(found[name], value) for name, value in expected.items() if name in found}


def _results(
    function: Callable[..., Tensor], inputs: tuple[Tensor, ...], module: nn.Module
) -> dict[str, Tensor]:
    """Return the output and all gradients, for a fixed gradient of the output."""
    leaves = [value.detach().clone().requires_grad_() for value in inputs]
    parameters = dict(module.named_parameters())
    required = {name: parameter.requires_grad for name, parameter in parameters.items()}
    try:
        for parameter in parameters.values():
            parameter.requires_grad_(True)
        with torch.enable_grad():
            output = function(*leaves)
        generator = torch.Generator().manual_seed(0)
        direction = torch.randn(output.shape, generator=generator, dtype=torch.float64)
        targets = [*leaves, *parameters.values()]
        grads = [torch.zeros_like(target) for target in targets]
        if output.requires_grad:
            grads = torch.autograd.grad(
                output, targets, direction.to(output), allow_unused=True, materialize_grads=True
            )
    finally:
        for name, parameter in parameters.items():
            parameter.requires_grad_(required[name])
    names = (
        "gradient of the tokens",
        "gradient of the weights",
        *(f"gradient of {n}" for n in parameters),
    )
    return {"output": output.detach(), **dict(zip(names, grads, strict=True))}


def _error(found: Tensor, expected: Tensor) -> float:
    scale = expected.abs().max().clamp(min=1e-30)
    return ((found.double() - expected).abs().max() / scale).item()
