"""Pages for a keyboard and a screen reader: rules of axe-core, checked on the HTML and the colours."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Mapping
from html.parser import HTMLParser
from pathlib import Path
from typing import NamedTuple
from unittest.mock import patch

import pytest

from moe_ffn.interop.audit import AuditReport, Finding
from moe_ffn.report import figures
from moe_ffn.report.drawing import LIGHT
from moe_ffn.report.html import TEMPLATES, render
from moe_ffn.report.inspect import inspect_model
from moe_ffn.report.inspect.page import inspection_html
from moe_ffn.report.page import report_html
from moe_ffn.report.plots import figures_page
from moe_ffn.report.studies.comparison_page import html_of_runs
from moe_ffn.report.trace import Choice, Layer, TextTrace, TokenTrace, Visit
from moe_ffn.report.trace_view import PALETTE, page
from moe_ffn.runs.reader import read_runs
from tests.helpers.synthetic_run import LETTERS, decoder_of, raise_alarms, random_text, write_run

AUDIT = AuditReport(
    "Decoder", {"experts": "8"}, ("layer_00",), (Finding("order", "layer_00", "fail", "a", "b"),)
)


class Element(NamedTuple):
    tag: str
    attributes: Mapping[str, str | None]
    above: tuple[str, ...]


class Elements(HTMLParser):
    def __init__(self, html: str) -> None:
        super().__init__()
        self.found: list[Element] = []
        self.open: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append(Element(tag, dict(attrs), tuple(self.open)))
        if tag not in ("meta", "link", "input", "br", "line"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag != "line":
            assert self.open.pop() == tag


def html_of(kind: str, folder: Path) -> str:
    """Return a page of one kind, without the script of plotly."""
    runs = [write_run(folder / name, experts=24 * (name == "a")) for name in "abc"]
    raise_alarms(runs[0])
    (run,) = read_runs(runs[:1])
    decoder = decoder_of({"type": "moe", "num_experts": 4}, LETTERS)
    layer = Layer("layer_00", ("0", "1"), "dropless")
    visit = Visit((Choice(0, 0.5, 0.5, False),), 0.1)
    trace = TextTrace("a", (layer,), (TokenTrace(0, "b", {layer.name: visit}, None),), {})
    with patch("moe_ffn.report.plots.get_plotlyjs", return_value=""):
        return {
            "run": lambda: report_html([run]),
            "comparison": lambda: html_of_runs(read_runs(runs)),
            "inspection": lambda: inspection_html(
                inspect_model(decoder, random_text(LETTERS)), run
            ),
            "trace": lambda: page(trace),
            "figures": lambda: figures_page("Figures", [figures.curve(run, "loss")]),
            "audit": lambda: render("audit.html", report=AUDIT, target="a"),
        }[kind]()


@pytest.mark.parametrize("kind", ["run", "comparison", "inspection", "trace", "figures", "audit"])
def test_a_page_has_names_landmarks_and_an_order(kind: str, tmp_path: Path) -> None:
    found = Elements(html_of(kind, tmp_path)).found
    assert found[0].attributes["lang"]
    tags = [element.tag for element in found]
    assert [tags.count(tag) for tag in ("title", "h1", "main")] == [1, 1, 1]
    levels = [int(tag[1]) for tag in tags if tag in ("h1", "h2", "h3", "h4")]
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels)), levels
    for element in found:
        of, above = element.attributes, element.above
        classes = {*(of.get("class") or "").split()}
        # The script of a trace lets the cells of its table take the focus.
        scrolls = bool({"scroll", "routed"} & classes) and "both" not in classes
        is_control = element.tag in ("select", "input", "button", "nav") or "plot" in classes
        assert not (is_control or scrolls) or of.get("aria-label") or "label" in above, element
        assert not scrolls or of.get("tabindex") == "0", element
        assert element.tag != "th" or of.get("scope") in ("col", "row"), element
        assert element.tag != "svg" or of.get("aria-hidden") == "true", element
        assert "main" in above or "body" not in above or element.tag in ("main", "script"), element


def contrast(*colours: str) -> float:
    parts = [[int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)] for colour in colours]
    linear = [
        [v / 12.92 if v <= 0.04 else ((v + 0.055) / 1.055) ** 2.4 for v in rgb] for rgb in parts
    ]
    low, high = sorted(0.2126 * r + 0.7152 * g + 0.0722 * b for r, g, b in linear)
    return (high + 0.05) / (low + 0.05)


def colours() -> Iterator[dict[str, str]]:
    """Yield role -> colour in the light, in the dark and in print."""
    media: dict[str, dict[str, str]] = {"": dict(LIGHT), "scheme: dark": {}, "media print": {}}
    for file in ("style.css", "report.css"):
        css = (TEMPLATES / file).read_text(encoding="utf-8")
        for before, block in re.findall(r"([^{}]*\{?\s*):root \{([^{}]*)\}", css):
            medium = next(medium for medium in reversed(media) if medium in before)
            media[medium] |= dict(re.findall(r"--([\w-]+): (#\w{6});", block))
    return (media[""] | found for found in media.values())


def test_texts_and_lines_contrast_with_their_background() -> None:
    texts = itertools.product(("ink", "quiet", "accent", "good", "warn", "bad"), ("paper", "panel"))
    pairs = [*texts, ("on-nothing", "nothing"), ("ink", "busy"), ("ink", "idle")]
    for found in colours():
        low = {(a, b): contrast(found[a], found[b]) for a, b in pairs}
        low |= {(ground, "black"): contrast(ground, "#000000") for ground in PALETTE}
        assert min(low.values()) >= 4.5, low
        lines = {r: contrast(c, found["paper"]) for r, c in found.items() if r.startswith("series")}
        assert min(lines.values()) >= 3, lines
