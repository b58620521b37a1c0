"""The trace of a text as one self-contained page."""

from __future__ import annotations

from typing import Any

from moe_ffn.report.html import render
from moe_ffn.report.trace import Layer, TextTrace, TokenTrace, Visit
from moe_ffn.report.trace_legend import (
    DROPPED,
    empty_cell,
    ground,
    ink,
    legend,
    mean_entropy,
    short,
)

_COLOURS = (
    "A colour stands for an expert's number within its layer: the same colour in another layer is "
    "another expert."
)


def page(trace: TextTrace) -> str:
    """The whole document."""
    visits = [visit for layer in trace.layers for visit in trace.visits(layer)]
    used = sorted({choice.expert for visit in visits for choice in visit.choices})
    predicts = any(token.prediction for token in trace.tokens)
    titles = [layer.title for layer in trace.layers]
    entropies = [mean_entropy(trace.visits(layer)) for layer in trace.layers]
    shown = ["" if entropy is None else f"{entropy:.2f}" for entropy in entropies]
    has_colours = any(not layer.is_gate for layer in trace.layers)
    return render(
        "trace.html",
        title=f"{trace.run}: one text's way",
        run=trace.run,
        colours=[(expert, ground(expert), ink(expert)) for expert in used],
        titles=[*titles, *["next"] * predicts],
        rows=[_row(token, trace) for token in trace.tokens],
        predicts=predicts,
        entropies=[*shown, *[""] * predicts],
        legend=[*legend(trace), *[_COLOURS] * has_colours],
        dropped=DROPPED,
    )


def _row(token: TokenTrace, trace: TextTrace) -> dict[str, Any]:
    guess = token.prediction
    return {
        "token": token.token,
        "cells": [_cell(token, layer) for layer in trace.layers],
        "next": (guess.token, short(guess.probability)) if guess else None,
    }


def _cell(token: TokenTrace, layer: Layer) -> dict[str, Any]:
    visit = token.visits[layer.name]
    choices = [
        {
            "expert": choice.expert,
            "name": layer.experts[choice.expert],
            "weight": short(choice.weight),
            "dropped": choice.dropped and not layer.is_gate,
            "is_gate": layer.is_gate,
        }
        for choice in (visit.choices if visit else ())
    ]
    empty = empty_cell(visit, layer.is_gate)
    return {"choices": choices, "empty": empty, "details": _details(token, layer, visit)}


def _details(token: TokenTrace, layer: Layer, visit: Visit | None) -> str:
    """Everything known of one cell, for whoever rests the pointer on it."""
    lines = [f"token {token.position} {token.token}, {layer.title}"]
    if visit is None:
        return "\n".join([*lines, "never came to this router"])
    for choice in visit.choices:
        who = "through the block" if layer.is_gate else f"expert {layer.experts[choice.expert]}"
        dropped = ", dropped" if choice.dropped else ""
        lines.append(f"{who}: weight {choice.weight:.4f}, score {choice.score:.4f}{dropped}")
    if not visit.choices:
        lines.append("passes by the block")
    if visit.entropy is not None:
        lines.append(f"entropy {visit.entropy:.3f} nats")
    return "\n".join(lines)
