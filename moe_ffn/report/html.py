"""The frame of every HTML page: one file, readable on a phone, in dark mode and in print."""

from __future__ import annotations

from html import escape
from pathlib import Path

from moe_ffn.files import write_whole

OPENING = "<!doctype html>"
"""How every page begins."""

STYLE = Path(__file__).with_name("style.css")


def html_page(title: str, body: str, *, script: str = "", head: str = "") -> str:
    """A whole document, with nothing in it that would have to be fetched.

    Args:
        title: plain text, escaped here.
        body: HTML; whoever makes it escapes what came from a run.
        script: JavaScript, run after the body.
        head: further elements of the head.
    """
    # A script ends at the first `</script`, wherever it stands, in a string too.
    safe_script = script.replace("</script", "<\\/script")
    return (
        f"{OPENING}\n"
        '<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        '<meta name="color-scheme" content="light dark">\n'
        '<link rel="icon" href="data:,">\n'  # else a browser asks for one
        f"<title>{escape(title)}</title>\n"
        f"<style>\n{STYLE.read_text(encoding='utf-8')}</style>\n{head}"
        f"</head>\n<body>\n{body}\n"
        + (f"<script>\n{safe_script}\n</script>\n" if script else "")
        + "</body>\n</html>\n"
    )


def write_page(path: Path, html: str) -> None:
    """Put the page in its place whole: who opens it while it is written sees the old one.

    The bytes of a file's name that are not UTF-8 stand in it as escapes.
    """
    write_whole(path, html.encode(errors="backslashreplace"))
