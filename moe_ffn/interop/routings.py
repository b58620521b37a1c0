"""Record the routing decisions of a live model as `Routing` values, for our metrics and losses.

T tokens, E experts, K experts per token, B batch, S sequence
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe_ffn.config.errors import ConfigError
from moe_ffn.ffn.base import FFNBlock, is_inner, layer_name, prefix_names
from moe_ffn.outputs import FFNOutput, Routing, TokenContext
from moe_ffn.routing.base import routing_of_pairs

Passes = list[dict[str, Routing]]
"""For each forward pass, a mapping from layer names (`layer_03`) to routings."""


@contextmanager
def watch(model: nn.Module) -> Iterator[Passes]:
    """Record the routings of a model of transformers, by layer, for each forward pass.

        with watch(model) as passes:
            model(**batch)
        load_balancing_loss(passes[-1]["layer_03"])

    The model's outputs do not change. A pass is one call of `model`; generation makes one pass for the prompt
    and one for each further token. A pass is appended when it is complete. Routings have the ids and weights
    that the experts received, and the id E for tokens that ZAYA's router skips. They carry gradients if the
    model trains, so call `routing.detach()` before you keep them. Padding in `attention_mask` is padding in
    the routing. `watch` also records our blocks (`swap_ffn`).

    Scores are the softmax, the sigmoid or the square root of the softplus of the router's logits, whichever
    is proportional to the weights; they are the softmax if none is (Phi-MoE).

    Raises:
        ConfigError: the model has no router that can be watched, or the `attention_mask` of a pass does not
            cover all tokens.
    """
    passes: Passes = []
    with ExitStack() as hooks:
        Watcher(model, hooks, lambda routings: passes.append(routings()))
        yield passes


class Watcher:
    """Hooks, removed when `hooks` closes, that record the routings of each forward pass. After it, `receive`
    gets a function that computes the routings of its layers.
    """

    def __init__(
        self,
        model: nn.Module,
        hooks: ExitStack,
        receive: Callable[[Callable[[], dict[str, Routing]]], None],
    ) -> None:
        self._receive = receive
        self._signature = inspect.signature(model.forward)
        self._pending: dict[str, Callable[[], dict[str, Routing]]] | None = None
        """Layer -> function that computes its routings; None outside a pass. Routings are computed after the
        pass, because activation checkpointing runs a layer twice."""
        self._mask_BS: Tensor | None = None
        self._length: int | None = None
        self._router_outputs: dict[str, list[tuple[Any, ...]]] = {}
        self._score: dict[str, Callable[[Tensor], Tensor]] = {}
        for name, path in routing_modules(model).items():
            module = model.get_submodule(path)
            if isinstance(module, FFNBlock):
                after = partial(self._after_block, name)
                hooks.enter_context(module.register_forward_hook(after))
                continue
            for sibling in sibling_modules(model, path):
                after = partial(self._after_sibling, name)
                hooks.enter_context(sibling.register_forward_hook(after))
            before = partial(self._before_experts, name)
            hooks.enter_context(module.register_forward_pre_hook(before, with_kwargs=True))
        hooks.enter_context(model.register_forward_pre_hook(self._begin, with_kwargs=True))
        hooks.enter_context(model.register_forward_hook(self._end, always_call=True))

    def _begin(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        arguments = call_arguments(self._signature, args, kwargs)
        inputs = (arguments.get(name) for name in ("input_ids", "inputs_embeds", "hidden_states"))
        tokens = next((value for value in inputs if isinstance(value, Tensor)), None)
        self._length = None if tokens is None or tokens.ndim < 2 else tokens.shape[1]
        mask = arguments.get("attention_mask")
        if mask is not None and not (isinstance(mask, Tensor) and mask.ndim == 2 and self._length):
            raise ConfigError(
                "attention_mask must have the shape (batch, sequence), with 0 for padding; leave it out if "
                "there is no padding"
            )
        # In generation the mask covers earlier tokens too.
        self._mask_BS = None if mask is None else mask[:, -self._length :].bool()  # pyright: ignore[reportOptionalOperand]
        self._pending = {}

    def _end(self, model: nn.Module, args: Any, output: Any) -> None:
        pending, self._pending = self._pending, None
        self._router_outputs.clear()  # a reference would keep the graph of this pass
        if pending is None or output is None:  # None after an error
            return

        def routings() -> dict[str, Routing]:
            return {
                name: value for compute in pending.values() for name, value in compute().items()
            }

        self._receive(routings)

    def _after_sibling(self, name: str, module: nn.Module, args: Any, output: Any) -> None:
        if self._pending is not None and isinstance(output, tuple):
            self._router_outputs.setdefault(name, []).append(output)

    def _before_experts(
        self, name: str, experts: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        if self._pending is None:
            return
        _, ids_TK, weights_TK = inputs_of_experts(args, kwargs)
        logits_TE = _logits_for(ids_TK, self._router_outputs.pop(name, []))
        if logits_TE is None or experts._is_expert_parallel:
            raise ConfigError(
                f"the router before {type(experts).__name__} does not return its logits together with "
                "the chosen experts, or the experts are divided among processes; watch a model in one "
                "process, whose routers return logits"
            )
        num_experts = getattr(experts, "num_experts", logits_TE.shape[1])
        if logits_TE.shape[1] > num_experts:  # ZAYA gives skipped tokens to expert 0 with weight 0
            ids_TK = ids_TK.masked_fill(weights_TK == 0, num_experts)
        self._pending[name] = partial(self._routing, name, logits_TE, ids_TK, weights_TK)

    def _routing(
        self, name: str, logits_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor
    ) -> dict[str, Routing]:
        dtype = torch.promote_types(weights_TK.dtype, torch.float32)
        logits_TE, weights_TK = logits_TE.to(dtype), weights_TK.to(dtype)
        if name not in self._score:
            self._score[name] = _score_function(logits_TE, ids_TK, weights_TK)
        scores_TE = self._score[name](logits_TE)
        context = self._context(len(ids_TK))
        return {name: routing_of_pairs(weights_TK, ids_TK.long(), logits_TE, scores_TE, context)}

    def _after_block(self, name: str, module: nn.Module, args: Any, output: FFNOutput) -> None:
        if self._pending is not None:
            self._pending[name] = partial(self._routings_of_block, name, output)

    def _routings_of_block(self, name: str, output: FFNOutput) -> dict[str, Routing]:
        routings = prefix_names(name, output.routings)
        for key, routing in routings.items():
            # An inner block reads other tokens than the layer.
            if routing.mask_T is None and not is_inner(key):
                mask_T = self._context(routing.num_tokens).mask
                routings[key] = replace(routing, mask_T=mask_T)
        return routings

    def _context(self, num_tokens: int) -> TokenContext:
        """Return the mask and the sequence length of the tokens that reached a layer."""
        mask_T = None if self._mask_BS is None else self._mask_BS.reshape(-1)
        if mask_T is not None and len(mask_T) != num_tokens:
            raise ConfigError(
                f"attention_mask has {len(mask_T)} tokens, but a layer received {num_tokens}; leave the "
                "mask out if there is no padding"
            )
        return TokenContext(mask=mask_T, sequence_length=self._length)


def routing_modules(model: nn.Module) -> dict[str, str]:
    """Find our blocks and transformers' experts: layer name -> path; ConfigError for none, or two a layer."""
    found: dict[str, str] = {}
    for path, module in model.named_modules():
        # Skip blocks inside our blocks: a shared expert, or the block of a mixture of depths.
        is_inner = any(path.startswith(f"{outer}.") for outer in found.values())
        if is_inner or not (isinstance(module, FFNBlock) or is_experts(module)):
            continue
        number = layer_of(path)
        if number is None or layer_name(number) in found:
            raise ConfigError(
                f"'{path}' of {type(model).__name__} is not in a numbered layer, or is the second in its "
                "layer; pass the submodule that is a single stack of layers"
            )
        found[layer_name(number)] = path
    if not found:
        raise ConfigError(
            f"no routing of {type(model).__name__} can be watched: it has none of our blocks, and no experts "
            "that receive ids and weights, as in most sparse models of transformers"
        )
    return found


def sparse_modules(model: nn.Module) -> dict[str, str]:
    """Return the modules of `routing_modules` that route tokens: without our dense blocks."""
    return {
        name: path
        for name, path in routing_modules(model).items()
        if not isinstance(module := model.get_submodule(path), FFNBlock) or module.routers()
    }


def number_of_layers(model: nn.Module, modules: Mapping[str, str]) -> int:
    """Return the length of the stack that contains the modules of `routing_modules`."""
    path = re.split(r"(?:^|\.)\d+(?:\.|$)", next(iter(modules.values())), maxsplit=1)[0]
    return len(list(model.get_submodule(path).children()))


def sibling_modules(model: nn.Module, path: str) -> list[nn.Module]:
    """Return the modules next to the experts at `path`, of which one is their router."""
    path = re.sub(r"(\.base_layer)+$", "", path)  # adapters of peft wrap the experts
    parent, _, own = path.rpartition(".")
    children = model.get_submodule(parent).named_children()
    return [module for name, module in children if name != own]


def call_arguments(
    signature: inspect.Signature, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the arguments of a call by name."""
    arguments = signature.bind_partial(*args, **kwargs).arguments
    return {**arguments, **arguments.get("kwargs", {})}


def is_experts(module: nn.Module) -> bool:
    """Return True if the class is decorated by transformers' `use_experts_implementation`."""
    return "is_concatenated" in vars(module)  # the decorator sets it in `__init__`


def inputs_of_experts(
    args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return hidden (T, D), ids (T, K) and weights (T, K), the arguments of such a class in its order."""
    hidden_TD, ids_TK, weights_TK = (*args, *kwargs.values())[:3]
    return hidden_TD, ids_TK, weights_TK


def layer_of(path: str) -> int | None:
    """Return the first number in the path of a module: 3 for `model.layers.3.mlp.experts`."""
    number = re.search(r"(?:^|\.)(\d+)(?:\.|$)", path)
    return int(number[1]) if number else None


def _logits_for(ids_TK: Tensor, outputs: list[tuple[Any, ...]]) -> Tensor | None:
    """Return the first element, (T, E), of the output tuple that contains the ids; None if there is none."""
    for output in outputs:
        if any(value is ids_TK for value in output) and isinstance(output[0], Tensor):
            logits = output[0]
            if logits.is_floating_point() and logits.shape[:-1].numel() == len(ids_TK):
                return logits.reshape(len(ids_TK), -1)
    return None


SCORES: tuple[Callable[[Tensor], Tensor], ...] = (
    partial(torch.softmax, dim=-1),
    torch.sigmoid,
    lambda logits_TE: F.softplus(logits_TE).sqrt(),
)


@torch.no_grad()
def _score_function(
    logits_TE: Tensor, ids_TK: Tensor, weights_TK: Tensor
) -> Callable[[Tensor], Tensor]:
    """Find the function in `SCORES` to which the weights are proportional, per token or over all tokens."""

    def spread(factors_TK: Tensor, dim: tuple[int, ...]) -> float:
        """Return the mean relative distance of the factors from their mean over `dim`."""
        mean = factors_TK.mean(dim, keepdim=True)
        return ((factors_TK - mean) / mean).abs().mean().item()

    def misfit(score: Callable[[Tensor], Tensor]) -> float:
        factors_TK = weights_TK / score(logits_TE).gather(1, ids_TK.long())
        within_token = spread(factors_TK, (1,)) if factors_TK.shape[1] > 1 else 1.0
        return min(within_token, spread(factors_TK, (0, 1)))

    best = min(SCORES, key=misfit)
    return best if misfit(best) < MAX_MISFIT else SCORES[0]


MAX_MISFIT = 0.02
"""Maximum relative spread of a factor that counts as constant; rounding to bfloat16 stays below it."""
