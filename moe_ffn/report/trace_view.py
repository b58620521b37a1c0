"""A trace of a text as tables for a terminal, and as a self-contained page."""

from __future__ import annotations

import colorsys
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cache

from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_ffn.report.html import render
from moe_ffn.report.trace import Layer, TextTrace, Visit

DROPPED, PAST, NONE, ABSENT = "x", "past", "none", "-"

_GAP = 2
"""Spaces between two columns."""

_MAX_TOKEN_WIDTH = 16


def page(trace: TextTrace) -> str:
    """The page as HTML."""
    lines = legend(trace)
    if any(not layer.is_gate for layer in trace.layers):
        lines.append(
            "A colour stands for an expert's number within its layer: the same colour in another layer "
            "is another expert."
        )
    visits = [visit for layer in trace.layers for visit in trace.visits(layer)]
    used = sorted({choice.expert for visit in visits for choice in visit.choices})
    return render(
        "trace.html",
        trace=trace,
        colours=[(expert, ground(expert), ink(expert)) for expert in used],
        legend=lines,
        dropped=DROPPED,
        short=short,
        empty_cell=empty_cell,
    )


def table(trace: TextTrace, width: int) -> RenderableType:
    """A row for each token, a column for each layer, and the legend.

    Layers that do not fit beside each other in `width` characters come in tables below each other; a line is
    longer than that only where a single pair does not fit.
    """
    tokens = [_clip(token.token) for token in trace.tokens]
    guesses = [token.prediction for token in trace.tokens]
    nexts = [
        f"{_clip(guess.token)} {short(guess.probability)}" if guess else "" for guess in guesses
    ]
    fixed = len(str(len(tokens))) + _GAP + max(map(cell_len, [*tokens, "entropy"]))
    beside_last = _GAP + max(map(cell_len, [*nexts, "next"])) if trace.predicts else 0
    blocks: list[dict[Layer, list[Text]]] = []
    used = 0
    for layer in trace.layers:
        room = width - fixed - (beside_last if layer is trace.layers[-1] else 0)
        cells = _cells(trace, layer, room - _GAP)
        lines = [line for cell in cells for line in cell.plain.split("\n")]
        needed = _GAP + max(map(cell_len, [*lines, layer.title]))
        if not blocks or used + needed > room:
            blocks.append({})
            used = 0
        blocks[-1][layer] = cells
        used += needed
    parts: list[RenderableType] = []
    for block in blocks:
        is_last = block is blocks[-1]
        parts += [_block(trace, tokens, block, nexts if is_last and trace.predicts else None), ""]
    return Group(*parts, *map(Text, legend(trace)))


def _block(
    trace: TextTrace,
    tokens: Sequence[str],
    layers: Mapping[Layer, Sequence[Text]],
    nexts: Sequence[str] | None,
) -> Table:
    entropies = {layer: _entropy(trace, layer) for layer in layers}
    show_footer = any(entropies.values())
    block = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_footer=show_footer)
    block.add_column(justify="right", no_wrap=True, style="dim")
    block.add_column("token", footer="entropy", no_wrap=True)
    for layer, entropy in entropies.items():
        block.add_column(layer.title, footer=entropy, no_wrap=True)
    if nexts is not None:
        block.add_column("next", no_wrap=True)
    columns = [map(Text, tokens), *layers.values(), *([map(Text, nexts)] if nexts else [])]
    for position, cells in enumerate(zip(*columns, strict=True)):
        block.add_row(str(position), *cells)
    return block


def _cells(trace: TextTrace, layer: Layer, room: int) -> list[Text]:
    """A layer's cell for each token: its (expert, weight) pairs, as many in a line as there is room for."""
    chosen = [choice for visit in trace.visits(layer) for choice in visit.choices]
    name = max((len(layer.experts[choice.expert]) for choice in chosen), default=1)
    number = max((len(short(choice.weight)) for choice in chosen), default=1)
    # A pair, a place for the mark of a dropped one, and a space before the next.
    per_line = max(1, (room + 1) // (name + number + 3))
    cells: list[Text] = []
    for visit in (token.visits[layer.name] for token in trace.tokens):
        if visit is None or not visit.choices:
            cells.append(Text(empty_cell(visit, layer), style="dim"))
            continue
        cell = Text()
        for place, choice in enumerate(visit.choices):
            if place:
                cell.append("\n" if place % per_line == 0 else " ")
            style = f"#000000 on {ground(choice.expert)}"
            if choice.dropped:
                style = f"strike {ink(choice.expert)}"
            pair = f"{layer.experts[choice.expert]:>{name}} {short(choice.weight):>{number}}"
            cell.append(pair, style="" if layer.is_gate else style)
            cell.append(DROPPED if choice.dropped else " ")
        cells.append(cell)
    return cells


def _entropy(trace: TextTrace, layer: Layer) -> str:
    entropy = trace.mean_entropy(layer)
    return "" if entropy is None else f"{entropy:.2f}"


def _clip(token: str) -> str:
    if cell_len(token) <= _MAX_TOKEN_WIDTH:
        return token
    return set_cell_size(token, _MAX_TOKEN_WIDTH - 1).rstrip() + "…"


def short(number: float) -> str:
    """A weight or a probability in two or three characters: `.62`, `1.0`, `25`."""
    if not math.isfinite(number):
        return str(number)
    text = f"{number:.2f}"
    if text.startswith("0."):
        return text[1:]
    return f"{number:.0f}" if number >= 9.95 else f"{number:.1f}"


def empty_cell(visit: Visit | None, layer: Layer) -> str:
    """The text of a cell whose token was sent to no expert."""
    return ABSENT if visit is None else PAST if layer.is_gate else NONE


# -- the legend


def legend(trace: TextTrace) -> list[str]:
    """What a reader has to know to read the table: one sentence each, and only of what is in it."""
    visits = {layer: trace.visits(layer) for layer in trace.layers}
    routed = [layer for layer in trace.layers if not layer.is_gate]
    sent = [(layer, c) for layer in routed for visit in visits[layer] for c in visit.choices]
    at_gates = [visit for layer in trace.layers if layer.is_gate for visit in visits[layer]]
    through = [choice for visit in at_gates for choice in visit.choices]
    lines: list[str] = []
    if sent:
        layer, choice = sent[0]
        name = layer.experts[choice.expert]
        lines.append(
            f"{name} {short(choice.weight)}: sent to expert {name}, whose output is multiplied by "
            f"{choice.weight:.2f}; the heaviest first. Expert {name} of another layer is another one."
        )
    if any(choice.dropped for choice in [*through, *(choice for _, choice in sent)]):
        lines.append(f"{DROPPED}: dropped; the expert was full and never saw the token.")
    if not all(visit.choices for layer in routed for visit in visits[layer]):
        lines.append(f"{NONE}: the router chose no expert.")
    if through:
        weight = through[0].weight
        lines.append(
            f"through {short(weight)}: passes through the layer's block, whose output is multiplied by "
            f"{weight:.2f}."
        )
    if not all(visit.choices for visit in at_gates):
        lines.append(f"{PAST}: passes by the layer's block.")
    if any(len(found) < len(trace.tokens) for found in visits.values()):
        lines.append(f"{ABSENT}: never came to this router.")
    without_network = {
        "zero": "returns 0",
        "copy": "returns the token",
        "const": "mixes in a learned vector",
    }
    names = [name for layer in routed for name in layer.experts]
    if said := [
        f"{word} {does}"
        for word, does in without_network.items()
        if any(name.startswith(word) for name in names)
    ]:
        lines.append(f"Experts without a network: {', '.join(said)}.")
    shared = {layer.title: layer.shared_expert for layer in routed if layer.shared_expert}
    for opening, values in {
        "Capacity in evaluation": {layer.title: layer.capacity for layer in routed},
        "Every token also passes through a shared expert": shared,
        "Nothing is routed": trace.unrouted,
    }.items():
        lines += [f"{opening}: {text}." for text in _by_layer(values)]
    if any(trace.mean_entropy(layer) is not None for layer in trace.layers):
        sizes = sorted({len(layer.experts) for layer in routed})
        undecided = ", ".join(f"{math.log(size):.2f} among {size} experts" for size in sizes)
        lines.append(
            "entropy: of a token's scores, in nats, mean over the tokens; 0 when the router is sure, "
            f"{undecided} when it is undecided."
        )
    if trace.predicts:
        lines.append("next: the token held to be the most probable next one, and its probability.")
    return lines


def _by_layer(values: Mapping[str, str]) -> list[str]:
    """Title of a layer -> value, as `swiglu (layer 0)`, `dense (layers 2, 3 inner)`, `moe (layers 4-11)`."""
    layers: dict[str, list[str]] = {}
    for title, value in values.items():
        layers.setdefault(value, []).append(title.removeprefix("layer "))
    return [
        f"{value} (layer{'s' if len(titles) > 1 else ''} {_span(titles)})"
        for value, titles in layers.items()
    ]


def _span(titles: Sequence[str]) -> str:
    """`0-11` where more than two follow each other, otherwise `0, 2 inner`."""
    start = int(titles[0]) if titles[0].isdigit() else 0
    if len(titles) > 2 and list(titles) == [str(start + place) for place in range(len(titles))]:
        return f"{titles[0]}-{titles[-1]}"
    return ", ".join(titles)


# -- colours

_GOLDEN = 0.618034
"""Steps of this part of the circle leave hues far apart, however many there are."""

_GROUNDS = 0.6, 0.36
"""Relative luminance (WCAG 2) of even and odd experts: hues that lie near each other are often an odd
number apart. Black on either has a contrast of at least 8."""

_MIDDLE = 0.179
"""Relative luminance that has a contrast of 4.58 with black and with white alike."""


def ground(expert: int) -> str:
    """`#rrggbb`, a ground to write on in black."""
    return _colour(expert, _GROUNDS[expert % 2])


def ink(expert: int) -> str:
    """`#rrggbb`, to write with on a dark or a light ground."""
    return _colour(expert, _MIDDLE)


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, 0 for black and 1 for white, as WCAG 2 defines it."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@cache
def _colour(expert: int, wanted: float) -> str:
    """The lightest of the expert's hue that is no lighter than wanted."""
    hue = (0.58 + expert * _GOLDEN) % 1

    def lightened(step: int) -> str:
        parts = colorsys.hls_to_rgb(hue, step / 4096, 0.7)
        return "#" + "".join(f"{round(255 * part):02x}" for part in parts)

    steps = range(4096)  # luminance grows with lightness
    return lightened(bisect_left(steps, wanted, key=lambda n: luminance(lightened(n))) - 1)
