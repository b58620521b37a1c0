"""Inspection of the units and routers of every layer on a text.

T tokens of a text
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

from torch import nn

from moe_ffn.config.errors import ConfigError
from moe_ffn.ffn import FFNBlock
from moe_ffn.ffn.base import layer_number
from moe_ffn.ffn.networks import hidden_units
from moe_ffn.model.decoder import Decoder, DecoderLayer
from moe_ffn.outputs import FFNOutput
from moe_ffn.report.expert_tokens import Assignment, RoutedText, route_windows
from moe_ffn.report.inspect import experts
from moe_ffn.report.inspect.experts import Agreement, Attribute
from moe_ffn.report.inspect.text import TokenizedText
from moe_ffn.report.inspect.units import LayerUnits, TopInputs, layer_units
from moe_ffn.runs.reader import Run

TOP_K = 10
"""Number of strongest inputs stored for each unit."""


@dataclass(frozen=True, eq=False)
class InspectedRouter:
    """One router and the experts it chooses from, on a text."""

    assignment: Assignment
    selects_tokens: bool
    """True for the router of a mixture of depths, which sends tokens through a block or around it."""
    agreement: Mapping[str, Agreement]
    """Name of an attribute -> share of the first choice that it explains."""

    @property
    def name(self) -> str:
        return self.assignment.name


@dataclass(frozen=True, eq=False)
class Inspection:
    """Contents of the feed-forward blocks of a run."""

    text: TokenizedText
    layers: tuple[int, ...]
    """Layers that were inspected."""
    types: Mapping[int, str]
    """Layer -> type of its block."""
    units: tuple[LayerUnits, ...]
    """Units of each layer whose hidden units see single tokens."""
    routers: Mapping[str, InspectedRouter]
    attributes: tuple[Attribute, ...]

    def __repr__(self) -> str:
        return f"Inspection({len(self.layers)} layers, {len(self.routers)} routers)"

    @property
    def without_units(self) -> list[int]:
        known = {units.layer for units in self.units}
        return [layer for layer in self.layers if layer not in known]

    @cached_property
    def routed(self) -> RoutedText:
        """Return the text and its pairs, including dropped pairs, for `expert_tokens.expert_tokens`."""
        text = self.text
        layers = {name: router.assignment for name, router in self.routers.items()}
        return RoutedText(text.tokenizer.token_bytes, text.ids_T, text.seq_len, layers)


def inspect_run(run: Run, text: TokenizedText, layers: Sequence[int] | None = None) -> Inspection:
    """Inspect the best weights of a run on a text, in evaluation mode; all layers, or only these.

    Raises ConfigError if the model lacks a layer, or the text has fewer than `TOP_K` tokens.
    """
    return inspect_model(run.model, text, layers)


def inspect_model(
    decoder: Decoder, text: TokenizedText, layers: Sequence[int] | None = None
) -> Inspection:
    """Inspect any decoder in evaluation mode, such as one from another checkpoint; see `inspect_run`."""
    ffns = decoder.config.layer_ffns()
    for layer in layers or ():
        if layer >= len(ffns):
            raise ConfigError(
                f"--layers: the model has no layer {layer}; it has 0 to {len(ffns) - 1}"
            )
    if len(text) < TOP_K:
        raise ConfigError(
            f"--text: the text has {len(text)} tokens, but a unit is judged by its {TOP_K} strongest inputs; "
            "give more text"
        )
    shown = tuple(sorted(set(range(len(ffns)) if layers is None else layers)))
    networks, assignments = observe(decoder, text, shown)
    attributes = tuple(experts.attributes(text))
    infos = decoder.config.router_infos()
    routers: dict[str, InspectedRouter] = {}
    for name, assignment in assignments.items():
        reached = assignment.reached_T
        first = assignment.first_T[reached]
        routers[name] = InspectedRouter(
            assignment,
            selects_tokens=name in infos and infos[name].selects_tokens,
            agreement={a.name: experts.agreement(first, a.labels_T[reached]) for a in attributes},
        )
    return Inspection(
        text=text,
        layers=shown,
        types={layer: ffns[layer].type for layer in shown},
        units=tuple(
            layer_units(layer, inputs, text, decoder)
            for layer, inputs in networks.items()
            if inputs
        ),
        routers=routers,
        attributes=attributes,
    )


def observe(
    decoder: Decoder, text: TokenizedText, layers: Sequence[int]
) -> tuple[dict[int, dict[str, TopInputs]], dict[str, Assignment]]:
    """Run the windows of a text; return each layer's top inputs by network, and the routers' choices."""
    networks: dict[int, dict[str, TopInputs]] = {layer: {} for layer in layers}

    def hook_of(layer: int) -> Callable[..., None]:
        first = 0

        def hook(ffn: nn.Module, args: tuple[Any, ...], output: FFNOutput) -> None:
            nonlocal first
            for units in hidden_units(cast("FFNBlock", ffn), *args):
                networks[layer].setdefault(units.name, TopInputs(TOP_K)).add(units, first)
            first += output.hidden[..., 0].numel()

        return hook

    with ExitStack() as hooks:
        for layer in layers:
            ffn = cast("DecoderLayer", decoder.layers[layer]).ffn
            hooks.enter_context(ffn.register_forward_hook(hook_of(layer)))
        assignments = route_windows(decoder, text.windows)
    return networks, {n: found for n, found in assignments.items() if layer_number(n) in layers}
