"""The way as one self-contained page."""

from __future__ import annotations

from html import escape

from moe_ffn.report.html import html_page
from moe_ffn.report.trace import Choice, Layer, TokenTrace, Visit, Way
from moe_ffn.report.trace_legend import (
    DROPPED,
    empty_cell,
    ground,
    ink,
    legend,
    mean_entropy,
    short,
)

_STYLE = """
.way { border-collapse: separate; border-spacing: 0; }
.way th, .way td { text-align: left; white-space: nowrap; padding: .2rem .5rem; }
.way th:first-child, .way td:first-child {
  position: sticky; left: 0; z-index: 1; background: var(--paper); border-right: 1px solid var(--line);
}
.way tfoot td, .way tfoot th { color: var(--quiet); font-weight: normal; border-bottom: 0; }
.way small { display: inline-block; min-width: 1.6rem; color: var(--quiet); font-weight: normal; }
.legend { padding-left: 1.2rem; }
.way code {
  display: inline-block; max-width: 9rem; overflow: hidden; text-overflow: ellipsis;
  vertical-align: bottom; font-size: .95rem;
}
.pair {
  display: inline-block; min-width: 4rem; margin-right: .2rem; padding: 0 .35rem;
  border: 1px solid transparent; border-radius: 3px; color: #000;
  print-color-adjust: exact; -webkit-print-color-adjust: exact;
}
.pair b { font-weight: 600; margin-right: .35rem; }
.pair.dropped { color: var(--quiet); border-style: dashed; }
.pair.dropped s b { font-weight: normal; }
.pair.through { color: var(--ink); border-color: var(--line); }
@media (pointer: coarse) { .hint { display: none; } }
"""

_COLOURS = (
    "A colour stands for an expert's number within its layer: the same colour in another layer is "
    "another expert."
)


def page(way: Way) -> str:
    """The whole document."""
    used = sorted({c.expert for token in way.tokens for c in _choices(token)})
    colours = "".join(
        f".pair.e{expert} {{ background: {ground(expert)}; }}\n"
        f".pair.dropped.e{expert} {{ background: none; border-color: {ink(expert)}; }}\n"
        for expert in used
    )
    predicts = any(token.prediction for token in way.tokens)
    heads = "".join(f'<th scope="col">{escape(layer.title)}</th>' for layer in way.layers)
    heads += '<th scope="col">next</th>' if predicts else ""
    rows = "\n".join(_row(token, way, predicts) for token in way.tokens)
    means = "".join(f"<td>{_mean_entropy(way, layer)}</td>" for layer in way.layers)
    means += "<td></td>" if predicts else ""
    lines = legend(way)
    if any(not layer.is_gate for layer in way.layers):
        lines.append(_COLOURS)
    explained = "\n".join(f"<li>{escape(line)}</li>" for line in lines)
    count = f"{len(way.tokens)} token{'' if len(way.tokens) == 1 else 's'}"
    body = (
        "<h1>One text's way through the experts</h1>\n"
        f'<p class="quiet">Run {escape(way.run)}, {count}.'
        '<span class="hint"> Rest the pointer on a cell for the scores behind it.</span></p>\n'
        '<div class="scroll"><table class="way">\n'
        f'<thead><tr><th scope="col">token</th>{heads}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n"
        f'<tfoot><tr><th scope="row">entropy</th>{means}</tr></tfoot>\n'
        f'</table></div>\n<ul class="legend">\n{explained}\n</ul>'
    )
    return html_page(f"{way.run}: one text's way", body, head=f"<style>{_STYLE}{colours}</style>\n")


def _row(token: TokenTrace, way: Way, predicts: bool) -> str:
    cells = "".join(_cell(token, layer) for layer in way.layers)
    if predicts:
        guess = token.prediction
        shown = f"<code>{escape(guess.token)}</code> {short(guess.probability)}" if guess else ""
        cells += f"<td>{shown}</td>"
    name = f"<small>{token.position}</small><code>{escape(token.token)}</code>"
    return f'<tr><th scope="row">{name}</th>{cells}</tr>'


def _cell(token: TokenTrace, layer: Layer) -> str:
    visit = token.visits[layer.name]
    if visit is None or not visit.choices:
        shown = f'<span class="quiet">{empty_cell(visit, layer.is_gate)}</span>'
    else:
        shown = "".join(_pair(choice, layer) for choice in visit.choices)
    return f'<td title="{escape(_details(token, layer, visit))}">{shown}</td>'


def _pair(choice: Choice, layer: Layer) -> str:
    name = escape(layer.experts[choice.expert])
    inside = f"<b>{name}</b>{short(choice.weight)}"
    if layer.is_gate:
        return f'<span class="pair through">{inside}</span>'
    if choice.dropped:
        return f'<span class="pair dropped e{choice.expert}"><s>{inside}</s>{DROPPED}</span>'
    return f'<span class="pair e{choice.expert}">{inside}</span>'


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


def _choices(token: TokenTrace) -> list[Choice]:
    return [choice for visit in token.visits.values() if visit for choice in visit.choices]


def _mean_entropy(way: Way, layer: Layer) -> str:
    entropy = mean_entropy(way.visits(layer))
    return "" if entropy is None else f"{entropy:.2f}"
