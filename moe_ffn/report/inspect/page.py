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
"""Kind of unit -> explanation in words."""


def inspection_html(found: Inspection, run: Run, script: str | None = None) -> str:
    """Return the page; for `script`, see `render_plots`."""
    return render_plots(
        "inspect.html",
        _plots(found),
        script=script,
        title=run.name,
        found=found,
        runs=[run],
        page=PageParts(found),
        reload_every=None,
        time=time.strftime("%Y-%m-%d %H:%M:%S"),
        TOP_K=TOP_K,
        AGREE=AGREE,
        NEAR=NEAR,
        expert_tokens=expert_tokens,
    )


def _plots(found: Inspection) -> dict[str, list[Plot]]:
    choosers = {
        layer_title(router.name): router
        for router in found.routers.values()
        if not router.selects_tokens and router.assignment.num_experts > 1
    }
    agreement, taken, more_taken = list[Plot](), list[Plot](), list[Plot]()
    if choosers:
        agreement.append(plot_of(figures.agreements(found)))
        for name in (attribute.name for attribute in found.attributes if attribute.names):
            drawn = {at: figures.taken(found, router.name, name) for at, router in choosers.items()}
            (taken if name.endswith("class") else more_taken).append(choice_of(drawn))
    return numbered(agreement=agreement, taken=taken, more_taken=more_taken)


class PageParts:
    """Texts of an inspection for the template."""

    def __init__(self, found: Inspection) -> None:
        self.found = found

    def findings(self) -> list[str]:
        """Return sentences with the main numbers."""
        found, lines = self.found, list[str]()
        known = [r for r in found.routers.values() if not math.isnan(r.agreement["token"].share)]
        if known:
            shares = [r.agreement["token"].above_chance for r in known]
            layers = [short_name(r.name) for r in known]
            lines.append(
                f"The token alone explains {_by_layer(shares, layers)} of the first choice, above chance."
            )
            others = [a.name for a in found.attributes if a.name != "token"]
            best = {
                name: float(np.mean([r.agreement[name].above_chance for r in known]))
                for name in others
            }
            strongest = sorted(best, key=lambda name: -best[name])
            lines.append(
                "Of the other attributes, each on its own, routing depends most on "
                + ", then ".join(f"{name} ({best[name]:.0%})" for name in strongest[:3])
                + f", and least on {strongest[-1]} ({_percent(best[strongest[-1]])}); means over the layers."
            )
        judged = [units for units in found.units if units.num_judged]
        layers = [str(units.layer) for units in judged]
        by_kind = {kind: [units.share(kind) for units in judged] for kind in KINDS if judged}
        for kind, shares in sorted(by_kind.items(), key=lambda found: -sum(found[1])):
            chance = max(units.chance[kind] for units in judged)
            lines.append(
                f"Of the units, {_by_layer(shares, layers)} respond to {_WORDS[kind]}; by chance "
                + (f"at most {_percent(chance)}." if chance >= 0.005 else "below 0.5%.")
            )
        return lines

    def unit_rows(self) -> list[list[str]]:
        rows: list[list[str]] = []
        for units in self.found.units:
            kinds = units.kind_U[units.judged_U]
            row = [str(units.layer), f"{len(units):,}", f"{len(units) - units.num_judged:,}"]
            row += [f"{_percent(units.share(k))} ({_percent(units.chance[k])})" for k in KINDS]
            row.append(_percent(float((kinds == "none").mean())) if len(kinds) else "-")
            agree = "-"
            if units.next_agreement is not None and units.next_chance is not None:
                agree = f"{_percent(units.next_agreement)} ({_percent(units.next_chance)})"
            rows.append([*row, agree])
        return rows

    def unit_examples(self, units: LayerUnits) -> list[dict[str, Any]]:
        text = self.found.text
        return [
            {
                "name": units.name(unit),
                "kind": units.kind_U[unit],
                "what": explanation(units, unit, text),
                "contexts": [
                    context(self.found.routed, t)
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
        for router in self.found.routers.values():
            row = [short_name(router.name)]
            for attribute in self.found.attributes:
                one = router.agreement[attribute.name]
                row.append(f"{_percent(one.share)} ({_percent(one.chance)})")
            rows.append(row)
        return rows

    def blocks(self) -> str:
        """Return the types of the blocks, such as `moe in layer 0, 1`."""
        types = self.found.types
        return "; ".join(
            f"{kind} in layer {', '.join(str(layer) for layer in types if types[layer] == kind)}"
            for kind in dict.fromkeys(types.values())
        )

    def absent(self) -> list[str]:
        """Return a sentence for each layer without units."""
        return [
            f"Layer {layer} ({self.found.types[layer]}) is not shown: it has no network "
            "whose hidden units see single tokens."
            for layer in self.found.without_units
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
