"""What a reader has to know to read the table: one sentence each, and only of what is in it."""

from __future__ import annotations

import colorsys
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache

from moe_ffn.report.trace import Choice, TextTrace, Visit

DROPPED, PAST, NONE, ABSENT = "x", "past", "none", "-"


def short(number: float) -> str:
    """A weight or a probability in two or three characters: `.62`, `1.0`, `25`."""
    if not math.isfinite(number):
        return str(number)
    text = f"{number:.2f}"
    if text.startswith("0."):
        return text[1:]
    return f"{number:.0f}" if number >= 9.95 else f"{number:.1f}"


def empty_cell(visit: Visit | None, is_gate: bool) -> str:
    """What stands where a token was sent to no expert."""
    if visit is None:
        return ABSENT
    return PAST if is_gate else NONE


def mean_entropy(visits: Iterable[Visit]) -> float | None:
    """Nats; None where no token has an entropy."""
    found = [visit.entropy for visit in visits if visit.entropy is not None]
    return sum(found) / len(found) if found else None


def legend(trace: TextTrace) -> list[str]:
    lines: list[str] = []
    gates = [layer for layer in trace.layers if layer.is_gate]
    routed = [layer for layer in trace.layers if not layer.is_gate]
    visits = {layer.name: trace.visits(layer) for layer in trace.layers}
    choices = [c for found in visits.values() for visit in found for c in visit.choices]
    examples = ((layer, choice) for layer in routed for choice in _choices(visits[layer.name]))
    if found := next(examples, None):
        layer, choice = found
        name = layer.experts[choice.expert]
        lines.append(
            f"{name} {short(choice.weight)}: sent to expert {name}, whose output is multiplied by "
            f"{choice.weight:.2f}; the heaviest first. Expert {name} of another layer is another one."
        )
    if any(choice.dropped for choice in choices):
        lines.append(f"{DROPPED}: dropped; the expert was full and never saw the token.")
    if any(not visit.choices for layer in routed for visit in visits[layer.name]):
        lines.append(f"{NONE}: the router chose no expert.")
    if let_through := next((c for gate in gates for c in _choices(visits[gate.name])), None):
        lines.append(
            f"through {short(let_through.weight)}: passes through the layer's block, whose output is "
            f"multiplied by {let_through.weight:.2f}."
        )
    if any(not visit.choices for gate in gates for visit in visits[gate.name]):
        lines.append(f"{PAST}: passes by the layer's block.")
    if any(len(visits[layer.name]) < len(trace.tokens) for layer in trace.layers):
        lines.append(f"{ABSENT}: never came to this router.")
    lines += _experts_without_network(trace)
    capacities = {layer.title: layer.capacity for layer in routed}
    lines += [f"Capacity in evaluation: {text}." for text in _by_layer(capacities)]
    shared = {layer.title: layer.shared_expert for layer in routed if layer.shared_expert}
    lines += [
        f"Every token also passes through a shared expert: {text}." for text in _by_layer(shared)
    ]
    lines += [f"Nothing is routed: {text}." for text in _by_layer(trace.unrouted)]
    if any(mean_entropy(found) is not None for found in visits.values()):
        most = sorted({len(layer.experts) for layer in routed})
        undecided = ", ".join(f"{math.log(size):.2f} among {size} experts" for size in most)
        lines.append(
            "entropy: of a token's scores, in nats, mean over the tokens; 0 when the router is sure, "
            f"{undecided} when it is undecided."
        )
    if any(token.prediction for token in trace.tokens):
        lines.append("next: the token held to be the most probable next one, and its probability.")
    return lines


def _choices(visits: Iterable[Visit]) -> list[Choice]:
    return [choice for visit in visits for choice in visit.choices]


def _experts_without_network(trace: TextTrace) -> list[str]:
    said = {"zero": "returns 0", "copy": "returns the token", "const": "mixes in a learned vector"}
    names = {name for layer in trace.layers if not layer.is_gate for name in layer.experts}
    words = dict.fromkeys(word for word in said if any(name.startswith(word) for name in names))
    if not words:
        return []
    listed = ", ".join(f"{word} {said[word]}" for word in words)
    return [f"Experts without a network: {listed}."]


def _by_layer(values: Mapping[str, str]) -> list[str]:
    """`dropless`, or `swiglu (layer 0), dense (layers 2, 3)` where it is not said of all there are."""
    layers: dict[str, list[str]] = {}
    for title, value in values.items():
        layers.setdefault(value, []).append(title.removeprefix("layer "))
    return [
        f"{value} (layer{'s' if len(titles) > 1 else ''} {_span(titles)})"
        for value, titles in layers.items()
    ]


def _span(titles: Sequence[str]) -> str:
    """`0-11` where more than two follow each other, otherwise `0, 2 inner`."""
    first = titles[0]
    if first.isdigit() and len(titles) > 2:
        following = range(int(first), int(first) + len(titles))
        if list(titles) == list(map(str, following)):
            return f"{first}-{titles[-1]}"
    return ", ".join(titles)


_GOLDEN = 0.618034
"""Steps of this part of the circle leave hues far apart, however many there are."""

_GROUNDS = 0.6, 0.36
"""Relative luminance (WCAG 2) of even and odd experts: hues that lie near each other are often an odd
number apart. Black on either has a contrast of at least 8."""

_MIDDLE = 0.179
"""Relative luminance that has a contrast of 4.58 with black and with white alike."""


@cache
def ground(expert: int) -> str:
    """`#rrggbb`, a ground to write on in black."""
    return _colour(expert, _GROUNDS[expert % 2])


@cache
def ink(expert: int) -> str:
    """`#rrggbb`, to write with on a dark or a light ground."""
    return _colour(expert, _MIDDLE)


def luminance(colour: str) -> float:
    """Relative luminance of `#rrggbb`, 0 for black and 1 for white, as WCAG 2 defines it."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _colour(expert: int, wanted: float) -> str:
    hue, low, high = (0.58 + expert * _GOLDEN) % 1, 0.0, 1.0
    for _ in range(12):  # luminance grows with lightness; 2**-12 is finer than a step of 1 / 255
        lightness = (low + high) / 2
        if luminance(_hex(hue, lightness)) < wanted:
            low = lightness
        else:
            high = lightness
    return _hex(hue, low)


def _hex(hue: float, lightness: float) -> str:
    return "#" + "".join(f"{round(255 * c):02x}" for c in colorsys.hls_to_rgb(hue, lightness, 0.7))
