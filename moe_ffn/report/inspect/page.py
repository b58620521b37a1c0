"""HTML page of an inspection."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from statistics import fmean

from moe_ffn.config.numbers import NONE
from moe_ffn.ffn.base import short_name
from moe_ffn.report.expert_tokens import context, expert_tokens
from moe_ffn.report.html import layer_title
from moe_ffn.report.inspect import figures
from moe_ffn.report.inspect.inspection import TOP_K, Inspection
from moe_ffn.report.inspect.units import AGREE, KINDS, NEAR, examples, explanation
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
        findings=findings(inspection),
        absent=absent(inspection),
        reload_every=None,
        time=time.strftime("%Y-%m-%d %H:%M:%S"),
        AGREE=AGREE,
        KINDS=KINDS,
        NEAR=NEAR,
        TOP_K=TOP_K,
        context=context,
        examples=examples,
        expert_tokens=expert_tokens,
        explanation=explanation,
        percent_text=percent_text,
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


def findings(inspection: Inspection) -> list[str]:
    """Return sentences with the main numbers."""
    lines: list[str] = []
    by_token = _above_chance(inspection, "token")
    if by_token:
        layers = [short_name(name) for name in by_token]
        lines.append(
            f"The token alone explains {_share_of_each_layer([*by_token.values()], layers)} of the first "
            "choice, above chance."
        )
    means = {
        attribute.name: fmean(found.values())
        for attribute in inspection.attributes
        if attribute.name != "token" and (found := _above_chance(inspection, attribute.name))
    }
    if means:
        ranked = sorted(means, key=lambda name: -means[name])
        least = f", and least on {ranked[-1]} ({percent_text(means[ranked[-1]])})"
        lines.append(
            "Of the other attributes, each on its own, routing depends most on "
            + ", then ".join(f"{name} ({means[name]:.0%})" for name in ranked[:3])
            + (least if len(ranked) > 1 else "")
            + "; means over the layers."
        )
    judged = [layer for layer in inspection.units if layer.num_judged]
    layers = [str(layer.layer) for layer in judged]
    by_kind = {kind: [layer.share(kind) for layer in judged] for kind in KINDS if judged}
    for kind, shares in sorted(by_kind.items(), key=lambda item: -sum(item[1])):
        chance = max(layer.chance[kind] for layer in judged)
        lines.append(
            f"Of the units, {_share_of_each_layer(shares, layers)} respond to {_WORDS[kind]}; by chance "
            + (f"at most {percent_text(chance)}." if chance >= 0.005 else "below 0.5%.")
        )
    return lines


def _above_chance(inspection: Inspection, attribute: str) -> dict[str, float]:
    """Return router -> share of its choice that the attribute explains; routers without one are left out."""
    shares = {r.name: r.agreement[attribute].above_chance for r in inspection.routers.values()}
    return {name: share for name, share in shares.items() if not math.isnan(share)}


def absent(inspection: Inspection) -> list[str]:
    """Return a sentence for each layer without units."""
    return [
        f"Layer {layer} ({inspection.types[layer]}) is not shown: it has no network whose hidden units "
        "see single tokens."
        for layer in inspection.without_units
    ]


def _share_of_each_layer(shares: Sequence[float], layers: Sequence[str]) -> str:
    """Return `65%, 40% (layer 0, 1)`; for more than six shares, their range and mean."""
    if len(shares) > 6:
        low, high, mean = min(shares), max(shares), sum(shares) / len(shares)
        return f"{low:.0%} to {high:.0%} (mean of {len(shares)}: {mean:.0%})"
    return f"{', '.join(f'{share:.0%}' for share in shares)} (layer {', '.join(layers)})"


def percent_text(share: float | None) -> str:
    """Return `65%` or `6.5%`; a dash for NaN and None."""
    if share is None or math.isnan(share):
        return NONE
    return f"{share:.0%}" if share >= 0.1 or abs(share) < 0.0005 else f"{share:.1%}"
