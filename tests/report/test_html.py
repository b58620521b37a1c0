"""The frame of the HTML pages, in a real browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from jinja2 import UndefinedError
from markupsafe import Markup
from playwright.sync_api import Browser

from moe_ffn.report.html import ENVIRONMENT, write_page
from tests.helpers.browser import PHONE, opened


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


def test_a_page_is_put_in_its_place_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "page.html"
    write_page(path, "old")

    def fail(descriptor: int) -> None:
        raise OSError("a full disk")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="a full disk"):
        write_page(path, "new")

    assert path.read_text() == "old"
    assert [p.name for p in tmp_path.iterdir() if p.name != "home"] == ["page.html"]


def test_what_a_template_shows_is_escaped_and_its_control_characters_are_seen() -> None:
    template = ENVIRONMENT.from_string('<p title="{{ text | plain }}">{{ text }}</p>{{ html }}')
    html = Markup("<b>bold</b>")
    assert template.render(text='<i>"\x1b\n', html=html) == (
        '<p title="&lt;i&gt;&#34;\\x1b\n">'
        '&lt;i&gt;&#34;<span class="control">\\x1b</span>\n</p><b>bold</b>'
    )


def test_a_value_that_a_template_lacks_is_an_error() -> None:
    with pytest.raises(UndefinedError, match="'text' is undefined"):
        ENVIRONMENT.from_string("{{ text }}").render()
