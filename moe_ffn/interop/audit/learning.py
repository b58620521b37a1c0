"""Checks of an audit on learning: gradients of experts and routers, and the optimizer's groups.

E experts, T tokens, N (token, expert) pairs
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from moe_ffn.ffn.base import without_round
from moe_ffn.interop.audit.behaviour import MIN_PAIRS_PER_EXPERT
from moe_ffn.interop.audit.findings import HEALTH, LEARNING, Finding, places
from moe_ffn.interop.audit.layers import SparseLayer, listed
from moe_ffn.interop.audit.probe import Probe, mode
from moe_ffn.interop.audit.structure import samples_of_experts
from moe_ffn.outputs import FFNOutput, Routing

MIN_ROUTER_SHARE = 1e-6
"""Norm of a router's gradient, as a share of the largest gradient norm in its layer, below which it is dead.
Weights that are constant up to rounding have a share of 1e-8."""

MIN_RATE_SHARE = 1e-4
"""Learning rate, as a share of the highest, below which a tensor is as good as frozen."""


def check_requires_grad(probe: Probe) -> Iterator[Finding]:
    """Find experts and routers that are frozen while the rest of the model trains."""
    trained = {id(p) for p in probe.model.parameters() if p.requires_grad}
    if not trained:
        yield LEARNING.skips("no parameter requires a gradient, so nothing is trained")
        return
    is_adapted = any(".lora_" in name for name, _ in probe.model.named_parameters())
    for layer in probe.layers:
        check = LEARNING.at(layer.name)
        frozen = [weight.name for weight in layer.weights if id(weight.parameter) not in trained]
        has_trained = len(frozen) < len(layer.weights)
        if layer.adapters and not any(id(a.parameter) in trained for a in layer.adapters):
            names = places(adapter.name for adapter in layer.adapters)
            yield check.fails(
                f"the adapters of the experts do not require a gradient: {names}",
                "load the adapter with is_trainable=True",
            )
        if is_adapted:
            continue
        if frozen:
            yield check.finding(
                "fail" if has_trained else "warn",
                f"{len(frozen)} of {len(layer.weights)} expert tensors do not require a gradient: "
                f"{places(frozen)}",
                "call requires_grad_() on them, unless they should stay as they are",
            )
        for what, parameters in (("router", layer.routers), ("shared expert", layer.shared)):
            fixed = [n for n, p in parameters.items() if "bias" not in n and id(p) not in trained]
            if fixed and has_trained:
                yield check.warns(
                    f"the {what} does not require a gradient, while the experts do: {places(fixed)}",
                    "call requires_grad_() on it, unless it should stay as it is",
                )


def check_optimizer(probe: Probe, optimizer: torch.optim.Optimizer) -> Iterator[Finding]:
    """Find trained tensors that the optimizer hardly changes, and weight decay on biases."""
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    names = dict(probe.model.named_parameters())
    if not any(parameter.requires_grad for parameter in names.values()):
        yield LEARNING.fails(
            "no parameter requires a gradient, so the optimizer has nothing to train",
            "call requires_grad_() on what it should train; load an adapter with is_trainable=True",
        )
        return
    absent = [n for n, p in names.items() if p.requires_grad and id(p) not in groups]
    if absent:
        sparse = {name for layer in probe.layers for name in layer.parameters}
        yield LEARNING.fails(
            f"{len(absent)} trainable tensors ({len(sparse.intersection(absent))} in sparse layers) are in "
            f"no group of the optimizer: {places(absent)}",
            "pass them to the optimizer; it may have been built before the model was changed",
        )
    rates = {n: float(groups[id(p)]["lr"]) for n, p in names.items() if id(p) in groups}
    highest = max(rates.values(), default=0.0)
    slow = [name for name, rate in rates.items() if rate < MIN_RATE_SHARE * highest]
    if slow:
        lowest = min(rates.values())
        yield LEARNING.fails(
            f"{len(slow)} tensors have a learning rate of {lowest:g}, others of {highest:g}: {places(slow)}",
            "raise the rate of their group",
        )
    decayed = [
        name
        for layer in probe.layers
        for name, parameter in layer.parameters.items()
        if "bias" in name.rpartition(".")[2] and groups.get(id(parameter), {}).get("weight_decay")
    ]
    if decayed:
        yield LEARNING.warns(
            f"{len(decayed)} biases of experts or routers have weight decay: {places(decayed)}",
            "put them into a group with weight_decay 0",
        )
    if not (absent or slow or decayed):
        yield LEARNING.passes(
            f"the optimizer has every trainable tensor, with rates up to {highest:g}"
        )


# -- gradients


def check_gradients(probe: Probe) -> Iterator[Finding]:
    """Run a backward pass of the cross-entropy, and look at the gradient of every expert and router."""
    if not any(parameter.requires_grad for parameter in probe.model.parameters()):
        return
    of_layers = dict.fromkeys(p for layer in probe.reached for p in layer.parameters.values())
    parameters = [parameter for parameter in of_layers if parameter.requires_grad]
    with mode(probe.model, training=True), torch.enable_grad(), ExitStack() as hooks:
        outputs: dict[str, list[tuple[int | None, Tensor]]] = {}
        for layer in probe.reached:
            _keep_outputs(layer, outputs.setdefault(layer.name, []), hooks)
        changes: dict[str, Any] = {"labels": None}
        if hasattr(probe.config, "output_router_logits"):
            changes["output_router_logits"] = False
        passed = probe.run(**changes)
        loss = probe.cross_entropy(passed.logits_BSV)
        if not loss.isfinite():
            yield LEARNING.fails(
                f"the cross-entropy of this batch is {loss.item()}",
                "find the first layer with NaN or infinity",
            )
            return
        gradients: dict[nn.Parameter, Tensor | None] = dict.fromkeys(parameters)
        if parameters and loss.requires_grad:
            # Unlike loss.backward(), this runs no optimizer that a hook of a gradient calls.
            grads = torch.autograd.grad(loss, parameters, allow_unused=True)
            gradients = dict(zip(parameters, grads, strict=True))
    for layer in probe.reached:
        used_E = _used_experts(layer, passed.routings, outputs[layer.name])
        if probe.ids_BS.numel() >= MIN_PAIRS_PER_EXPERT * layer.num_experts:
            yield from _idle_experts(layer, used_E)
        problems = [
            *_expert_problems(layer, used_E, gradients),
            *_router_problems(layer, gradients),
            *_shared_problems(layer, gradients),
        ]
        yield from problems
        if not problems and any(p.requires_grad for p in layer.parameters.values()):
            yield LEARNING.at(layer.name).passes(_learned(layer))


def _learned(layer: SparseLayer) -> str:
    """Return what learns in a layer, of which an adapter may train a part."""
    experts = (tensor.parameter for tensor in (*layer.weights, *layer.adapters))
    has_router = any(parameter.requires_grad for parameter in layer.routers.values())
    if any(parameter.requires_grad for parameter in experts):
        others = "no other has one, and the router learns" if has_router else "and no other has one"
        return f"each expert that changed the loss has a gradient, {others}"
    return f"the {'router' if has_router else 'shared expert'} learns; the experts do not"


def _keep_outputs(
    layer: SparseLayer, kept: list[tuple[int | None, Tensor]], hooks: ExitStack
) -> None:
    """Keep the outputs of the experts, whose gradients show which tokens reached the loss."""

    def keep(expert: int | None, module: nn.Module, args: Any, output: Any) -> None:
        hidden = output.hidden if isinstance(output, FFNOutput) else output
        if isinstance(hidden, Tensor) and hidden.requires_grad:
            hidden.retain_grad()
            kept.append((expert, hidden))

    modules: list[tuple[int | None, nn.Module]] = [(None, layer.block)]
    if layer.kind == "fused":
        modules = [(None, layer.experts[-1])]
    elif layer.kind == "listed":
        modules = [pair for experts in layer.experts for pair in enumerate(listed(experts))]
    for expert, module in modules:
        hooks.enter_context(module.register_forward_hook(partial(keep, expert)))


def _used_experts(
    layer: SparseLayer, routings: Mapping[str, Routing], kept: list[tuple[int | None, Tensor]]
) -> Tensor | None:
    """Return the experts that computed a token that reached the loss, bool (E,); None if unknown."""
    if layer.kind == "listed":
        used = {e for e, out in kept if out.grad is not None and bool(out.grad.any())}
        return torch.tensor([expert in used for expert in range(layer.num_experts)])
    rounds = [r for name, r in routings.items() if without_round(name) == layer.name]
    if not rounds or len(kept) != 1 or kept[0][1].grad is None:
        return None
    grad = kept[0][1].grad
    reached_T = (grad.reshape(-1, grad.shape[-1]) != 0).any(dim=-1)
    used_E = torch.zeros(rounds[0].num_experts, dtype=torch.bool, device=reached_T.device)
    for routing in rounds:
        if len(reached_T) != routing.num_tokens or routing.num_experts < layer.num_experts:
            return None
        reached_N = routing.computed_N & reached_T[routing.token_indices_N]
        used_E[routing.expert_ids_N[reached_N & (routing.weights_N != 0)]] = True
    return used_E[: layer.num_experts].cpu()


def _idle_experts(layer: SparseLayer, used_E: Tensor | None) -> Iterator[Finding]:
    """Warn about experts in a list that computed no token; other experts are judged by their routing."""
    trained = {w.expert for w in layer.weights if w.parameter.requires_grad}
    idle = [e for e in trained if e is not None and used_E is not None and not used_E[e]]
    if idle:
        yield HEALTH.at(layer.name).warns(
            f"{len(idle)} of {layer.num_experts} experts computed no token: {places(idle)}",
            "give a longer or more varied text, or look at the code between router and experts",
        )


def _expert_problems(
    layer: SparseLayer, used_E: Tensor | None, gradients: Mapping[nn.Parameter, Tensor | None]
) -> Iterator[Finding]:
    """Yield one finding for each kind of wrong gradient of the layer's experts."""
    check = LEARNING.at(layer.name)
    advice = "look for detach, no_grad or a replaced forward between the experts and the loss"
    tensors = [t for t in (*layer.weights, *layer.adapters) if t.parameter.requires_grad]
    trained = [(tensor, gradients.get(tensor.parameter)) for tensor in tensors]
    missing = [
        tensor.name
        for tensor, grad in trained
        if grad is None and (used_E is None or tensor.expert is None or used_E[tensor.expert])
    ]
    broken = [t.name for t, grad in trained if grad is not None and not grad.isfinite().all()]
    if missing:
        yield check.fails(
            f"{len(missing)} expert tensors have no gradient after a backward pass: {places(missing)}",
            advice,
        )
    if broken:
        yield check.fails(
            f"gradients of {len(broken)} expert tensors are NaN or infinite: {places(broken)}",
            "lower the learning rate or scale",
        )
    if used_E is None or missing or broken or not trained:
        return
    norms_E = torch.zeros(layer.num_experts, dtype=torch.float64)
    still: list[str] = []
    for tensor, grad in trained:
        if grad is None:
            continue
        rows = tensor.by_expert(grad, layer.num_experts).double().norm(dim=-1).cpu()
        if tensor.expert is not None:
            norms_E[tensor.expert] += rows[0]
            continue
        norms_E += rows
        if not tensor.adapter and used_E.any() and not rows[used_E].any():
            still.append(tensor.name)
    dead = (used_E & (norms_E == 0)).nonzero().flatten().tolist()
    stray = (~used_E & (norms_E > 0)).nonzero().flatten().tolist()
    if dead:
        yield check.fails(
            f"{len(dead)} experts computed tokens but have a gradient of zero: {places(dead)}",
            advice,
        )
    elif still:
        yield check.fails(f"the gradient of {places(still)} is zero for every expert", advice)
    if stray:
        yield check.fails(
            f"{len(stray)} experts computed no token but have a gradient: {places(stray)}",
            "compare the order of experts and of the router's rows",
        )


def _router_problems(
    layer: SparseLayer, gradients: Mapping[nn.Parameter, Tensor | None]
) -> Iterator[Finding]:
    trained = {name: p for name, p in layer.routers.items() if p.requires_grad and p.ndim >= 2}
    if not trained or layer.num_experts == 1:
        return
    norms = {p: grad.double().norm().item() for p, grad in gradients.items() if grad is not None}
    largest = max(norms.values(), default=0.0)
    router = sum(norms.get(parameter, 0.0) for parameter in trained.values())
    if not router > MIN_ROUTER_SHARE * largest:
        # Copies of one expert, as after upcycling, compute the same however the router weighs them.
        has_copies = len(set(samples_of_experts(layer))) < layer.num_experts
        yield LEARNING.at(layer.name).finding(
            "warn" if has_copies else "fail",
            f"the cross-entropy gives the router no gradient (norm {router:.1e}, largest {largest:.1e}): "
            f"{places(trained)}",
            "equal experts give it none; it learns once they differ"
            if has_copies
            else "do not detach the weights of the experts, and do not renormalise one expert per token",
        )


def _shared_problems(
    layer: SparseLayer, gradients: Mapping[nn.Parameter, Tensor | None]
) -> Iterator[Finding]:
    dead = [
        name
        for name, parameter in layer.shared.items()
        if parameter.requires_grad
        and ".lora_A." not in name  # zero, because B begins at zero
        and ((grad := gradients.get(parameter)) is None or not grad.any())
    ]
    matrices = {name: p for name, p in layer.shared.items() if p.ndim >= 2 and ".lora_" not in name}
    zero = [name for name, matrix in matrices.items() if not matrix.any()]
    if len(zero) == 1:  # it stops the gradient of the others, as at the start of training
        dead = [name for name in dead if name in zero]
    if dead and len(zero) < 2:  # two zero matrices never train, as in an expert that was added
        yield LEARNING.at(layer.name).fails(
            f"{len(dead)} of {len(layer.shared)} tensors of the shared expert have no gradient: "
            f"{places(dead)}",
            "look for a forward that drops its output, detach or no_grad",
        )
