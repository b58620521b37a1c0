"""A trace as tables: a row for each token, a column for each layer, as many as the terminal is wide."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from moe_ffn.report.trace import Choice, Layer, Prediction, TextTrace, Visit
from moe_ffn.report.trace_legend import (
    DROPPED,
    empty_cell,
    ground,
    ink,
    legend,
    mean_entropy,
    short,
)

_GAP = 2
_WIDEST_TOKEN = 16


@dataclass(frozen=True)
class _Column:
    """A layer's column, laid out: its cells as lines of pairs."""

    layer: Layer
    cells: tuple[Text, ...]
    width: int
    footer: str


def render(trace: TextTrace, width: int) -> RenderableType:
    """Everything that is shown, in lines of at most `width` characters where one pair fits at all."""
    tokens = [_clip(token.token) for token in trace.tokens]
    room = width - len(str(len(tokens))) - _GAP - max(map(cell_len, [*tokens, "entropy"]))
    nexts = [_prediction(token.prediction) for token in trace.tokens] if _predicts(trace) else None
    beside_last = _GAP + max(map(cell_len, [*nexts, "next"])) if nexts else 0
    columns = [
        _column(trace, layer, room - _GAP - (beside_last if layer is trace.layers[-1] else 0))
        for layer in trace.layers
    ]
    blocks = _blocks(columns, room, beside_last)
    parts: list[RenderableType] = []
    for number, block in enumerate(blocks):
        last = number == len(blocks) - 1
        parts += [_table(tokens, block, nexts if last else None), Text("")]
    return Group(*parts, *map(Text, legend(trace)))


def _table(tokens: Sequence[str], columns: Sequence[_Column], nexts: Sequence[str] | None) -> Table:
    footers = any(column.footer for column in columns)
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0), show_footer=footers)
    table.add_column(justify="right", no_wrap=True, style="dim")
    table.add_column("token", footer="entropy", no_wrap=True)
    for column in columns:
        table.add_column(
            column.layer.title, footer=column.footer, min_width=column.width, no_wrap=True
        )
    if nexts is not None:
        table.add_column("next", no_wrap=True)
    for position, token in enumerate(tokens):
        cells = [column.cells[position] for column in columns]
        guessed = [Text(nexts[position])] if nexts is not None else []
        table.add_row(str(position), Text(token), *cells, *guessed)
    return table


def _blocks(columns: Sequence[_Column], room: int, beside_last: int) -> list[list[_Column]]:
    """Neighbouring layers that fit beside each other, and what the model predicts beside the last."""
    blocks: list[list[_Column]] = [[]]
    used = 0
    for column in columns:
        needed = column.width + _GAP + (beside_last if column is columns[-1] else 0)
        if blocks[-1] and used + needed > room:
            blocks.append([])
            used = 0
        blocks[-1].append(column)
        used += column.width + _GAP
    return blocks


def _column(trace: TextTrace, layer: Layer, room: int) -> _Column:
    visits = [token.visits[layer.name] for token in trace.tokens]
    chosen = [choice for visit in visits if visit for choice in visit.choices]
    name = max((len(layer.experts[choice.expert]) for choice in chosen), default=1)
    number = max((len(short(choice.weight)) for choice in chosen), default=1)
    # A pair, a place for the mark of a dropped one, and a space before the next.
    per_line = max(1, (room + 1) // (name + number + 3))
    cells = tuple(_cell(visit, layer, name, number, per_line) for visit in visits)
    widest = max(cell_len(line) for cell in cells for line in cell.plain.split("\n"))
    entropy = mean_entropy(trace.visits(layer))
    return _Column(
        layer,
        cells,
        max(widest, len(layer.title)),
        "" if entropy is None else f"{entropy:.2f}",
    )


def _cell(visit: Visit | None, layer: Layer, name: int, number: int, per_line: int) -> Text:
    if visit is None or not visit.choices:
        return Text(empty_cell(visit, layer.is_gate), style="dim")
    text = Text()
    for place, choice in enumerate(visit.choices):
        if place:
            text.append("\n" if place % per_line == 0 else " ")
        pair = f"{layer.experts[choice.expert]:>{name}} {short(choice.weight):>{number}}"
        text.append(pair, style="" if layer.is_gate else _style(choice))
        text.append(DROPPED if choice.dropped else " ")
    return text


def _style(choice: Choice) -> str:
    if choice.dropped:
        return f"strike {ink(choice.expert)}"
    return f"#000000 on {ground(choice.expert)}"


def _predicts(trace: TextTrace) -> bool:
    return any(token.prediction for token in trace.tokens)


def _prediction(prediction: Prediction | None) -> str:
    return f"{_clip(prediction.token)} {short(prediction.probability)}" if prediction else ""


def _clip(token: str) -> str:
    if cell_len(token) <= _WIDEST_TOKEN:
        return token
    return set_cell_size(token, _WIDEST_TOKEN - 1).rstrip() + "…"
