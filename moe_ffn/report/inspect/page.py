"""HTML page of an inspection."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_ffn.model.decoder import short_name
from moe_ffn.report.expert_tokens import context, expert_tokens
from moe_ffn.report.html import layer_title
from moe_ffn.report.inspect import figures
from moe_ffn.report.inspect.inspection import TOP_K, Inspection
from moe_ffn.report.inspect.units import AGREE, KINDS, NEAR, LayerUnits, examples, explanation
from moe_ffn.report.plots import Plot, choice_of, numbered, plot_of, render_plots
from moe_ffn.runs.reader import Run

_WORDS = {
    "token": "one token",
    "suffix": "a suffix of two or more tokens",
    "position in line": "a position in the line",
    "position in sequence": "a position in the sequence",
}
"""Kind of explanation -> what the units respond to, in words."""


def inspection_html(inspection: Inspection, run: Run, script: str | None = None) -> str:
    """Return the page; for `script`, see `render_plots`."""
    return render_plots(
        "inspect.html",
        _plots(inspection),
        script=script,
        title=run.name,
        inspection=inspection,
        runs=[run],
        page=PageParts(inspection),
        reload_every=None,
        time=time.strftime("%Y-%m-%d %H:%M:%S"),
        TOP_K=TOP_K,
        AGREE=AGREE,
        NEAR=NEAR,
        expert_tokens=expert_tokens,
    )


def _plots(inspection: Inspection) -> dict[str, list[Plot]]:
    routers = [
        router.name
        for router in inspection.routers.values()
        if not router.selects_tokens and router.assignment.num_experts > 1
    ]
    agreement, taken, more_taken = list[Plot](), list[Plot](), list[Plot]()
    if routers:
        agreement.append(plot_of(figures.agreements(inspection)))
        for name in (attribute.name for attribute in inspection.attributes if attribute.names):
            by_layer = {layer_title(r): figures.taken(inspection, r, name) for r in routers}
            (taken if name.endswith("class") else more_taken).append(choice_of(by_layer))
    return numbered(agreement=agreement, taken=taken, more_taken=more_taken)


class PageParts:
    """Texts of an inspection for the template."""

    def __init__(self, inspection: Inspection) -> None:
        self.inspection = inspection

    def findings(self) -> list[str]:
        """Return sentences with the main numbers."""
        inspection, lines = self.inspection, list[str]()
        routers = [
            r for r in inspection.routers.values() if not math.isnan(r.agreement["token"].share)
        ]
        if routers:
            shares = [r.agreement["token"].above_chance for r in routers]
            layers = [short_name(r.name) for r in routers]
            lines.append(
                f"The token alone explains {_by_layer(shares, layers)} of the first choice, above chance."
            )
            means = {
                name: float(np.mean([r.agreement[name].above_chance for r in routers]))
                for name in (a.name for a in inspection.attributes if a.name != "token")
            }
            ranked = sorted(means, key=lambda name: -means[name])
            lines.append(
                "Of the other attributes, each on its own, routing depends most on "
                + ", then ".join(f"{name} ({means[name]:.0%})" for name in ranked[:3])
                + f", and least on {ranked[-1]} ({_percent(means[ranked[-1]])}); means over the layers."
            )
        judged = [units for units in inspection.units if units.num_judged]
        layers = [str(units.layer) for units in judged]
        by_kind = {kind: [units.share(kind) for units in judged] for kind in KINDS if judged}
        for kind, shares in sorted(by_kind.items(), key=lambda item: -sum(item[1])):
            chance = max(units.chance[kind] for units in judged)
            lines.append(
                f"Of the units, {_by_layer(shares, layers)} respond to {_WORDS[kind]}; by chance "
                + (f"at most {_percent(chance)}." if chance >= 0.005 else "below 0.5%.")
            )
        return lines

    def unit_rows(self) -> list[list[str]]:
        rows: list[list[str]] = []
        for units in self.inspection.units:
            kinds = units.kind_U[units.judged_U]
            row = [str(units.layer), f"{len(units):,}", f"{len(units) - units.num_judged:,}"]
            row += [f"{_percent(units.share(k))} ({_percent(units.chance[k])})" for k in KINDS]
            row.append(_percent(float((kinds == "none").mean())) if len(kinds) else "-")
            next_token = "-"
            if units.next_agreement is not None and units.next_chance is not None:
                next_token = f"{_percent(units.next_agreement)} ({_percent(units.next_chance)})"
            rows.append([*row, next_token])
        return rows

    def unit_examples(self, units: LayerUnits) -> list[dict[str, Any]]:
        text = self.inspection.text
        return [
            {
                "name": units.name(unit),
                "kind": units.kind_U[unit],
                "explanation": explanation(units, unit, text),
                "contexts": [
                    context(self.inspection.routed, t)
                    for t in units.tokens_Uk[unit].tolist()[:4]
                    if t >= 0
                ],
                "activation": f"{units.activations_Uk[unit, 0]:.2f}",
                "promotes": [text.token(int(v)) for v in units.promoted_Up[unit]],
            }
            for unit in examples(units)
        ]

    def agreement_rows(self) -> list[list[str]]:
        """Return a row per router: share (chance) of each attribute."""
        rows: list[list[str]] = []
        for router in self.inspection.routers.values():
            row = [short_name(router.name)]
            for attribute in self.inspection.attributes:
                agreement = router.agreement[attribute.name]
                row.append(f"{_percent(agreement.share)} ({_percent(agreement.chance)})")
            rows.append(row)
        return rows

    def blocks(self) -> str:
        """Return the types of the blocks, such as `moe in layer 0, 1`."""
        types = self.inspection.types
        return "; ".join(
            f"{kind} in layer {', '.join(str(layer) for layer in types if types[layer] == kind)}"
            for kind in dict.fromkeys(types.values())
        )

    def absent(self) -> list[str]:
        """Return a sentence for each layer without units."""
        return [
            f"Layer {layer} ({self.inspection.types[layer]}) is not shown: it has no network "
            "whose hidden units see single tokens."
            for layer in self.inspection.without_units
        ]


def _by_layer(shares: Sequence[float], layers: Sequence[str]) -> str:
    """Return `65%, 40% (layer 0, 1)`; for more than six shares, their range and mean."""
    if len(shares) > 6:
        low, high, mean = min(shares), max(shares), sum(shares) / len(shares)
        return f"{low:.0%} to {high:.0%} (mean of {len(shares)}: {mean:.0%})"
    return f"{', '.join(f'{share:.0%}' for share in shares)} (layer {', '.join(layers)})"


def _percent(share: float) -> str:
    if math.isnan(share):
        return "-"
    return f"{share:.0%}" if share >= 0.1 or abs(share) < 0.0005 else f"{share:.1%}"
