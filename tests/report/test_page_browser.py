"""The page in a real browser: drawn, without a word on the console, on a phone and in print."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup
from playwright.sync_api import Browser, Page

from moe_ffn.interop.audit import AuditReport, Finding
from moe_ffn.report import figures
from moe_ffn.report.drawing import LIGHT
from moe_ffn.report.html import ENVIRONMENT, TEMPLATES, render, write_page
from moe_ffn.report.inspect import inspect_model
from moe_ffn.report.inspect.page import inspection_html
from moe_ffn.report.page import report_html, write_report
from moe_ffn.report.plots import figures_page
from moe_ffn.report.studies.comparison_page import html_of_runs
from moe_ffn.report.trace import Choice, Layer, TextTrace, TokenTrace, Visit
from moe_ffn.report.trace_view import PALETTE, page
from moe_ffn.runs.reader import read_runs
from tests.helpers.browser import DESKTOP, PHONE, Opened, opened
from tests.helpers.synthetic_run import (
    LETTERS,
    age,
    change,
    decoder_of,
    raise_alarms,
    random_text,
    write_arm,
    write_run,
)

Pages = Callable[[str], Path]


@pytest.fixture(scope="module")
def page_of(tmp_path_factory: pytest.TempPathFactory) -> Pages:
    """The page of a kind of run, written when it is first asked for."""
    where = tmp_path_factory.mktemp("runs")

    def make_run(name: str) -> Path:
        if (where / name).exists():
            return where / name
        if name == "deep":
            return write_run(where / name, layers=12, experts=64, rows=20)
        if name == "dense":
            return write_run(where / name, experts=0)
        if name == "interrupted":
            folder = write_run(where / name, layers=2, experts=4, is_finished=False)
            age(folder, 5000)
            return folder
        folder = write_run(where / name)
        raise_alarms(folder)
        long_word = '{"step": 100, "prompt": "def ", "text": "' + 300 * "x" + '"}\n'
        (folder / "samples.jsonl").write_text(long_word)
        return folder

    @cache
    def written(name: str) -> Path:
        names = ["moe", "dense", "interrupted"] if name == "overlay" else [name]
        folders = [make_run(run) for run in names]
        write_report(html_of_runs, folders, where / f"{name}.html")
        return where / f"{name}.html"

    return written


@pytest.fixture(scope="module")
def moe(browser: Browser, page_of: Pages) -> Iterator[Opened]:
    """The page of a routed run on a desktop, opened once: to open five megabytes takes a while."""
    with drawn(browser, page_of("moe")) as found:
        yield found


@pytest.fixture(scope="module")
def overlay(browser: Browser, page_of: Pages) -> Iterator[Opened]:
    """The page of three runs, on a phone in the dark."""
    with drawn(browser, page_of("overlay"), width=PHONE, dark=True) as found:
        yield found


@contextmanager
def drawn(browser: Browser, path: Path, **options: Any) -> Iterator[Opened]:
    with opened(browser, path, **options) as found:
        found.page.wait_for_selector("html[data-drawn]")
        yield found


# Plots that are folded away are drawn when they are unfolded.
PLOTS = """() => [...document.querySelectorAll('.plot')].filter(p => p.checkVisibility()).map(plot => ({
    width: plot.getBoundingClientRect().width,
    svg: plot.querySelector('svg.main-svg')?.getBoundingClientRect().width ?? 0,
    traces: plot.querySelectorAll('.scatterlayer .trace path, .heatmaplayer image').length,
    titles: plot.querySelectorAll('.xtitle, .ytitle').length,
    legends: plot.querySelectorAll('.legend .traces, .infolayer .colorbar').length,
}))"""


def check_drawn(found: Opened, at_least: int = 5) -> None:
    plots = found.page.evaluate(PLOTS)
    assert found.errors == []
    assert found.overflow == 0
    assert len(plots) >= at_least
    for plot in plots:
        assert plot["traces"] >= 1
        assert plot["titles"] == 2
        assert plot["legends"] >= 1
        assert 0 < plot["svg"] <= plot["width"] + 1


def test_every_plot_is_drawn_on_a_desktop(moe: Opened) -> None:
    moe.keep("report-desktop")
    check_drawn(moe)


def test_every_plot_is_drawn_on_a_phone(overlay: Opened) -> None:
    overlay.keep("report-overlay-phone")
    check_drawn(overlay)
    check_texts(overlay.page)


def test_plots_shrink_with_the_window(moe: Opened) -> None:
    moe.page.set_viewport_size({"width": PHONE, "height": 900})
    moe.page.wait_for_function(
        f"[...document.querySelectorAll('.main-svg')].every(s => s.clientWidth < {PHONE})"
    )
    moe.keep("report-phone")
    check_drawn(moe)
    folded = moe.page.locator("details:has(.plot)").first
    folded.locator("summary").first.click()
    folded.locator(".main-svg").first.wait_for()
    check_drawn(moe)
    folded.locator("summary").first.click()
    check_texts(moe.page)
    moe.page.set_viewport_size({"width": DESKTOP, "height": 900})


@pytest.mark.slow
@pytest.mark.parametrize("width", [PHONE, DESKTOP])
@pytest.mark.parametrize("name", ["moe", "deep", "dense", "interrupted", "overlay"])
def test_pages_of_every_kind(browser: Browser, page_of: Pages, name: str, width: int) -> None:
    with drawn(browser, page_of(name), width=width, dark=width == PHONE) as found:
        found.keep(f"report-{name}-{width}")
        check_drawn(
            found, at_least=2 if name == "dense" else 5
        )  # a dense run has no routing to draw
        check_texts(found.page)


def check_texts(page: Page) -> None:
    """Check by their boxes that no texts of a plot overlap or are cut off."""
    found = page.evaluate(
        """() => [...document.querySelectorAll('.plot')].flatMap(plot => {
            const texts = [...plot.querySelectorAll('svg text')]
                .map(t => [t.textContent, t.getBoundingClientRect()])
                .filter(([text, box]) => text && box.width);
            const frame = plot.getBoundingClientRect();
            const cut = texts.filter(([, box]) =>
                box.left < frame.left - 2 || box.right > frame.right + 2 ||
                box.top < frame.top - 2 || box.bottom > frame.bottom + 2);
            const over = texts.flatMap(([a, p], i) => texts.slice(i + 1).flatMap(([b, q]) => {
                const wide = Math.min(p.right, q.right) - Math.max(p.left, q.left);
                const high = Math.min(p.bottom, q.bottom) - Math.max(p.top, q.top);
                return wide > 1 && high > 1 ? [`${plot.ariaLabel}: ${a} / ${b}`] : [];
            }));
            return [...cut.map(([text]) => `${plot.ariaLabel}: ${text} is cut`), ...over];
        })"""
    )
    assert found == []


def test_long_words_of_a_comparison_fit_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    for arm in (50 * "g", "swiglu"):
        write_arm(tmp_path / "runs", arm, [2.0, 2.1])
    runs = sorted((tmp_path / "runs").iterdir())
    for number, run in enumerate(runs):
        change(run / "facts.json", git_revision=64 * str(number))
    write_report(html_of_runs, runs, tmp_path / "page.html")
    with drawn(browser, tmp_path / "page.html", width=PHONE) as found:
        assert 64 * "0" in found.page.locator(".verdict").first.inner_text()
        assert found.overflow == 0


CONTRAST = """() => {
    const rgb = css => css.match(/[\\d.]+/g).slice(0, 3).map(Number);
    const light = css => rgb(css)
        .map(v => v / 255).map(v => v <= .04 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
        .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
    const ratio = (a, b) => (Math.max(a, b) + .05) / (Math.min(a, b) + .05);
    const ground = light(getComputedStyle(document.body).backgroundColor);
    const of = (selector, key) => [...document.querySelectorAll(selector)]
        .map(e => ratio(light(getComputedStyle(e)[key]), ground));
    return {
        texts: Math.min(...of('.plot svg text', 'fill')),
        lines: Math.min(...of('.scatterlayer .js-line', 'stroke')),
        ground: getComputedStyle(document.body).backgroundColor,
    };
}"""


IS_DRAWN = """() => {
    const style = getComputedStyle(document.documentElement);
    const [paper, ink] = ["--paper", "--ink"].map(role => style.getPropertyValue(role).trim());
    return document.documentElement.dataset.drawn === `${paper} ${ink}`;
}"""


def legible(page: Page) -> str:
    """The ground, once texts and lines stand out from it as WCAG asks for (AA)."""
    page.wait_for_function(IS_DRAWN)
    found = page.evaluate(CONTRAST)
    assert found["texts"] >= 4.5
    assert found["lines"] >= 3
    return found["ground"]


WHITE, BLACK = "rgb(255, 255, 255)", "rgb(20, 23, 27)"


def test_the_plots_are_legible_in_every_light_and_on_paper(overlay: Opened) -> None:
    page = overlay.page
    assert legible(page) == BLACK
    page.emulate_media(color_scheme="light")
    assert legible(page) == WHITE
    page.emulate_media(color_scheme="dark", media="print")
    page.set_viewport_size({"width": 720, "height": 1000})  # A4 within its margins
    assert legible(page) == WHITE
    assert overlay.overflow == 0
    overlay.keep("report-overlay-print")
    page.emulate_media(color_scheme="dark", media="screen")
    page.set_viewport_size({"width": PHONE, "height": 900})
    assert legible(page) == BLACK
    assert overlay.errors == []


def test_paper_shows_the_config_and_the_screen_hides_it_again(moe: Opened) -> None:
    moe.page.evaluate(
        "addEventListener('beforeprint', () => {"
        "  window.shown = [...document.querySelectorAll('details')].every(d => d.open) })"
    )
    moe.page.pdf()
    assert moe.page.evaluate("window.shown") is True
    assert moe.page.locator("details:not([open])").count() > 0
    assert moe.page.evaluate(PLOTS)[0]["svg"] > 1000, "as wide as the screen again"


def hover(page: Page, title: str) -> str:
    plot = page.locator(f'.plot[aria-label="{title}"]')
    plot.scroll_into_view_if_needed()
    plot.locator(".nsewdrag").first.hover()
    page.wait_for_selector(f'.plot[aria-label="{title}"] .hoverlayer text')
    return plot.locator(".hoverlayer").text_content() or ""


def test_a_plot_shows_the_values_under_the_pointer(moe: Opened) -> None:
    loss = hover(moe.page, "Loss")
    assert loss.startswith("step 3")
    assert "training : 1." in loss
    load = hover(moe.page, "Load of each expert")
    assert load.startswith("step 310, expert 3"), "expert 0 is at the top"
    assert load.endswith(" times the even share")
    assert "layer 3 : " in hover(moe.page, "Dropped")


def test_losses_are_looked_at_over_flops(overlay: Opened) -> None:
    plot = overlay.page.locator('.plot[aria-label="Validation loss"]')
    assert plot.locator(".xtitle").text_content() == "tokens trained on"
    choice = 'figure:has([aria-label="Validation loss"]) select'
    overlay.page.select_option(choice, label="training FLOPs")
    assert plot.locator(".xtitle").text_content() == "training FLOPs"
    assert plot.locator(".legendtext").count() == 3


@pytest.mark.slow
def test_a_reloading_page_keeps_its_scroll_position(browser: Browser, tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", layers=8, experts=4, rows=40, is_finished=False)
    output = tmp_path / "report.html"
    write_report(report_html, [run], output, reload_every=1)
    with drawn(browser, output) as found:
        page = found.page
        page.select_option("select", label="layer 3")
        page.locator("summary", has_text="config.yaml").click()
        page.evaluate("scrollTo(0, 1234); window.first = true")
        page.wait_for_function("!window.first", timeout=10_000)
        page.wait_for_selector("html[data-drawn]")
        assert page.evaluate("scrollY") == 1234
        assert page.locator("select").first.input_value() == "3"
        assert page.locator("details", has_text="config.yaml").get_attribute("open") is not None

        page.uncheck("#reload")
        page.evaluate("window.held = true")
        page.wait_for_timeout(1_300)
        assert page.evaluate("window.held") is True
        assert found.errors == []


@pytest.mark.slow
def test_a_reload_with_a_new_sample_keeps_open_what_was_opened(
    browser: Browser, tmp_path: Path
) -> None:
    run = write_run(tmp_path / "run", layers=1, experts=4, rows=40, is_finished=False)
    output = tmp_path / "report.html"

    def write_with(num_samples: int) -> None:
        lines = [{"step": n, "prompt": "def", "text": " f"} for n in range(1, num_samples + 1)]
        (run / "samples.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        write_report(report_html, [run], output, reload_every=1)

    write_with(5)
    with drawn(browser, output) as found:
        page = found.page
        page.locator("summary", has_text="config.yaml").click()
        page.locator("summary", has_text="step 3").click()
        write_with(6)
        page.wait_for_selector("html[data-drawn] summary:has-text('step 6')", timeout=10_000)
        opened = page.eval_on_selector_all(
            "details[open] > summary", "all => all.map((summary) => summary.textContent)"
        )

    assert opened == ["step 1", "step 4", "step 5", "step 6", "config.yaml"]


# -- the frame of the pages


def html_page(title: str, body: str, script: str = "") -> str:
    template = ENVIRONMENT.from_string(
        '{% extends "page.html" %}{% block body %}{{ body | safe }}{% endblock %}'
        "{% block script %}<script>{{ script | script }}</script>{% endblock %}"
    )
    return template.render(kind="Test", title=title, body=body, script=script)


def test_a_page_opens_from_disk_without_a_word(browser: Browser, tmp_path: Path) -> None:
    script = 'document.querySelector("h1").textContent = "</script> is only text here";'
    write_page(tmp_path / "page.html", html_page("a < b", "", script=script))

    with opened(browser, tmp_path / "page.html", width=PHONE) as found:
        assert found.errors == []
        assert found.overflow == 0
        assert found.page.title() == "a < b"
        assert found.page.inner_text("h1") == "</script> is only text here"


def test_a_page_is_replaced_atomically(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    write_page(path, "old")

    def fail(descriptor: int) -> None:
        raise OSError("a full disk")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="a full disk"):
        write_page(path, "new")

    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir() if p.name != "home"] == ["page.html"]


def test_templates_escape_markup_and_show_control_characters() -> None:
    template = ENVIRONMENT.from_string('<p title="{{ text | plain }}">{{ text }}</p>{{ html }}')
    html = Markup("<b>bold</b>")
    assert template.render(text='<i>"\x1b\n', html=html) == (
        '<p title="&lt;i&gt;&#34;\\x1b\n">'
        '&lt;i&gt;&#34;<span class="control">\\x1b</span>\n</p><b>bold</b>'
    )


def test_a_value_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'text' is undefined"):
        ENVIRONMENT.from_string("{{ text }}").render()


# -- rules of axe-core for keyboards and screen readers, checked on the HTML and the colours

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
