"""Trace of a text, as tables in a terminal or as a self-contained page."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence

from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_ffn.ffn.base import without_round
from moe_ffn.report.html import render
from moe_ffn.report.trace import Layer, TextTrace, Visit

DROPPED, PAST, NO_EXPERT, ABSENT = "x", "past", "none", "-"

_GAP = 2
"""Spaces between two columns."""

_MAX_TOKEN_WIDTH = 16


def page(trace: TextTrace, intro: str = "") -> str:
    """Return the HTML page of a trace; `intro` replaces the name of the run."""
    lines = legend(trace)
    if any(not layer.selects_tokens for layer in trace.layers):
        lines.append(
            "The colour of an expert follows from its index; experts of different layers are different "
            "experts, also if their colours are equal."
        )
    if any(len(layer.experts) > len(PALETTE) for layer in trace.layers):
        lines.append(f"Experts whose indices differ by {len(PALETTE)} have the same colour.")
    return render(
        "trace.html",
        trace=trace,
        intro=intro,
        colour_of=colour_of,
        findings=findings(trace),
        legend=lines,
        dropped=DROPPED,
        weight_text=weight_text,
        empty_cell=empty_cell,
    )


def findings(trace: TextTrace) -> list[str]:
    """Return sentences on how evenly the text is spread over the experts; empty if no expert is chosen."""
    pairs = [
        (layer, choice)
        for layer in trace.layers
        if not layer.selects_tokens
        for visit in trace.visits(layer)
        for choice in visit.choices
    ]
    if not pairs:
        return []
    num_pairs = Counter(layer for layer, _ in pairs)
    loads = Counter((layer, choice.expert) for layer, choice in pairs)
    busiest = max(loads, key=lambda pair: loads[pair] / num_pairs[pair[0]])
    layer, expert = busiest
    sizes = {without_round(layer.name): len(layer.experts) for layer in num_pairs}
    used = {(without_round(layer.name), expert) for layer, expert in loads}
    dropped = sum(choice.dropped for _, choice in pairs)
    lines = [
        f"The largest share goes to expert {layer.experts[expert]} of {layer.title}: "
        f"{loads[busiest] / num_pairs[layer]:.0%} of the (token, expert) pairs of its layer, where an even "
        f"share is {1 / len(layer.experts):.0%}.",
        f"{len(used)} of {sum(sizes.values())} experts get a token.",
    ]
    return lines + ([f"{dropped} of {len(pairs)} pairs are dropped."] if dropped else [])


def table(trace: TextTrace, width: int) -> RenderableType:
    """Return tables with a row per token and a column per layer, and the legend.

    Layers that do not fit into `width` characters are shown in further tables below.
    """
    tokens = [_clip(token.token) for token in trace.tokens]
    predictions = [
        f"{_clip(p.token)} {weight_text(p.probability)}" if p else ""
        for p in (token.prediction for token in trace.tokens)
    ]
    first_width = len(str(len(tokens))) + _GAP + max(map(cell_len, [*tokens, "entropy"]))
    last_width = _GAP + max(map(cell_len, [*predictions, "next"])) if trace.predicts else 0
    blocks: list[dict[Layer, list[Text]]] = []
    used = 0
    for layer in trace.layers:
        available = width - first_width - (last_width if layer is trace.layers[-1] else 0)
        cells = _cells(trace, layer, available - _GAP)
        lines = [line for cell in cells for line in cell.plain.split("\n")]
        needed = _GAP + max(map(cell_len, [*lines, layer.title]))
        if not blocks or used + needed > available:
            blocks.append({})
            used = 0
        blocks[-1][layer] = cells
        used += needed
    tables: list[RenderableType] = []
    for block in blocks:
        has_next = trace.predicts and block is blocks[-1]
        tables += [_block(trace, tokens, block, predictions if has_next else None), ""]
    return Group(*tables, *map(Text, legend(trace)))


def _block(
    trace: TextTrace,
    tokens: Sequence[str],
    layers: Mapping[Layer, Sequence[Text]],
    predictions: Sequence[str] | None,
) -> Table:
    means = {layer: trace.mean_entropy(layer) for layer in layers}
    entropies = {layer: "" if mean is None else f"{mean:.2f}" for layer, mean in means.items()}
    show_footer = any(entropies.values())
    block = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_footer=show_footer)
    block.add_column(justify="right", no_wrap=True, style="dim")
    block.add_column("token", footer="entropy", no_wrap=True)
    for layer, entropy in entropies.items():
        block.add_column(layer.title, footer=entropy, no_wrap=True)
    if predictions is not None:
        block.add_column("next", no_wrap=True)
    columns = [
        map(Text, tokens),
        *layers.values(),
        *([map(Text, predictions)] if predictions else []),
    ]
    for position, cells in enumerate(zip(*columns, strict=True)):
        block.add_row(str(position), *cells)
    return block


def _cells(trace: TextTrace, layer: Layer, width: int) -> list[Text]:
    """Return the cell of each token: its (expert, weight) pairs, as many per line as fit."""
    chosen = [choice for visit in trace.visits(layer) for choice in visit.choices]
    name = max((len(layer.experts[choice.expert]) for choice in chosen), default=1)
    number = max((len(weight_text(choice.weight)) for choice in chosen), default=1)
    # A pair has an expert, a weight, a mark if it is dropped, and spaces.
    per_line = max(1, (width + 1) // (name + number + 3))
    cells: list[Text] = []
    for visit in (token.visits[layer.name] for token in trace.tokens):
        if visit is None or not visit.choices:
            cells.append(Text(empty_cell(visit, layer), style="dim"))
            continue
        cell = Text()
        for place, choice in enumerate(visit.choices):
            if place:
                cell.append("\n" if place % per_line == 0 else " ")
            style = "strike" if choice.dropped else f"#000000 on {colour_of(choice.expert)}"
            pair = f"{layer.experts[choice.expert]:>{name}} {weight_text(choice.weight):>{number}}"
            cell.append(pair, style="" if layer.selects_tokens else style)
            cell.append(DROPPED if choice.dropped else " ")
        cells.append(cell)
    return cells


def _clip(token: str) -> str:
    if cell_len(token) <= _MAX_TOKEN_WIDTH:
        return token
    return set_cell_size(token, _MAX_TOKEN_WIDTH - 1).rstrip() + "…"


def weight_text(number: float) -> str:
    """Return a weight or probability in two or three characters: `.62`, `1.0`, `25`."""
    if not math.isfinite(number):
        return str(number)
    text = f"{number:.2f}"
    if text.startswith("0."):
        return text[1:]
    return f"{number:.0f}" if number >= 9.95 else f"{number:.1f}"


def empty_cell(visit: Visit | None, layer: Layer) -> str:
    """Return the text of a cell without an expert."""
    return ABSENT if visit is None else PAST if layer.selects_tokens else NO_EXPERT


# -- the legend


def legend(trace: TextTrace) -> list[str]:
    """Return sentences that explain the cells of this trace."""
    routed = [layer for layer in trace.layers if not layer.selects_tokens]
    at_routers = [visit for layer in routed for visit in trace.visits(layer)]
    at_gates = [
        visit for layer in trace.layers if layer.selects_tokens for visit in trace.visits(layer)
    ]
    visits = at_routers + at_gates
    has_absent = len(visits) < len(trace.layers) * len(trace.tokens)
    has_entropy = any(visit.entropy is not None for visit in visits)
    has_special = any(not name.isdigit() for layer in routed for name in layer.experts)
    sizes = sorted({len(layer.experts) for layer in routed})
    undecided = ", ".join(f"{math.log(size):.2f} among {size} experts" for size in sizes)
    shared = {layer.title: layer.shared_expert for layer in routed if layer.shared_expert}
    by_layer = {
        "Capacity in evaluation": {layer.title: layer.capacity for layer in routed},
        "Every token also passes through a shared expert": shared,
        "Nothing is routed": trace.unrouted,
    }
    lines = [
        (
            any(visit.choices for visit in at_routers),
            "2 .62: sent to expert 2, whose output is multiplied by 0.62; the largest weight first. "
            "Expert 2 of another layer is a different expert.",
        ),
        (
            any("/round_" in layer.name for layer in routed),
            "Each round of a layer has its own router; all rounds share the experts.",
        ),
        (
            any(choice.dropped for visit in visits for choice in visit.choices),
            f"{DROPPED}: dropped; the expert was full and did not process the token.",
        ),
        (
            not all(visit.choices for visit in at_routers),
            f"{NO_EXPERT}: the router chose no expert.",
        ),
        (
            any(visit.choices for visit in at_gates),
            "through .70: passes through the layer's block, whose output is multiplied by 0.70.",
        ),
        (not all(visit.choices for visit in at_gates), f"{PAST}: skips the layer's block."),
        (has_absent, f"{ABSENT}: did not reach this router."),
        (
            has_special,
            "Experts without a network: zero returns 0, copy returns the token, const mixes in a learned "
            "vector.",
        ),
        *(
            (True, f"{opening}: {text}.")
            for opening, values in by_layer.items()
            for text in _values_with_layers(values)
        ),
        (
            has_entropy,
            "entropy: mean over tokens of the entropy of the scores in nats; 0 if the router is certain, "
            f"{undecided} if all scores are equal.",
        ),
        (trace.predicts, "next: the most probable next token, and its probability."),
    ]
    return [line for is_shown, line in lines if is_shown]


def _values_with_layers(values: Mapping[str, str]) -> list[str]:
    """Return values with layers: `swiglu (layer 0)`, `dense (layers 2, 3 inner)`, `moe (layers 4-9)`."""
    layers: dict[str, list[str]] = {}
    for title, value in values.items():
        layers.setdefault(value, []).append(title.removeprefix("layer "))
    return [
        f"{value} (layer{'s' if len(titles) > 1 else ''} {_span(titles)})"
        for value, titles in layers.items()
    ]


def _span(titles: Sequence[str]) -> str:
    """Return `0-11` for more than two consecutive layers, otherwise `0, 2 inner`."""
    start = int(titles[0]) if titles[0].isdigit() else 0
    if len(titles) > 2 and list(titles) == [str(start + place) for place in range(len(titles))]:
        return f"{titles[0]}-{titles[-1]}"
    return ", ".join(titles)


# -- colours

PALETTE = (
    *("#66c5cc", "#f6cf71", "#f89c74", "#dcb0f2", "#87c55f", "#9eb9f3", "#fe88b1", "#c9db74"),
    *("#8be0a4", "#b497e7", "#ffffb3", "#fb8072", "#d9d9d9", "#80b1d3", "#fccde5", "#ccebc5"),
)
"""Backgrounds for black text: `Pastel` and `Set3` of plotly.colors.qualitative."""


def colour_of(expert: int) -> str:
    """Return the background of an expert, `#rrggbb`; colours repeat after 16 experts."""
    return PALETTE[expert % len(PALETTE)]
