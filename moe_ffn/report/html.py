"""Pages from templates; an HTML page loads nothing from the network.

HTML templates escape every value and make control characters visible, so text from a run cannot execute on
a page.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import (
    Environment,
    FileSystemLoader,
    StrictUndefined,
    pass_eval_context,
    select_autoescape,
)
from jinja2.nodes import EvalContext
from markupsafe import Markup, escape

from moe_ffn.config.errors import printable
from moe_ffn.config.files import write_atomically
from moe_ffn.config.numbers import compact, number
from moe_ffn.ffn.base import short_name
from moe_ffn.notebook_cards import evenly_chosen

OPENING = "<!doctype html>"
"""Beginning of every page."""


def render(template: str, **values: Any) -> str:
    """Return the page of a file in `templates/`; a missing variable is an error."""
    return ENVIRONMENT.get_template(template).render(values)


def write_page(path: Path, html: str) -> None:
    """Write a page atomically; bytes of file names that are not UTF-8 are escaped."""
    write_atomically(path, html.encode(errors="backslashreplace"))


def layer_title(name: str) -> str:
    """Return the title of a layer: `layer 3 inner` for `layer_03/inner`."""
    return f"layer {short_name(name)}"


# -- the templates


def plain(value: object) -> str:
    """Return text for an attribute, with control characters escaped."""
    return printable(str(value), also="\n\t")


@pass_eval_context
def _escaped(context: EvalContext, value: Any) -> Any:
    """Return a value of a template: HTML and everything in Markdown unchanged, other text escaped."""
    if isinstance(value, Markup) or not context.autoescape:
        return value
    text = str(value)
    if plain(text) == text:
        return escape(text)
    return Markup().join(
        escape(c) if plain(c) == c else Markup('<span class="control">{}</span>').format(plain(c))
        for c in text
    )


TEMPLATES = Path(__file__).parent / "templates"
ENVIRONMENT = Environment(
    loader=FileSystemLoader(TEMPLATES),
    autoescape=select_autoescape(["html"]),
    undefined=StrictUndefined,
    finalize=_escaped,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
ENVIRONMENT.filters |= {
    "number": number,
    "compact": compact,
    "plain": plain,
    # `</script` inside a JavaScript string would end the script.
    "script": lambda source: Markup(source.replace("</script", "<\\/script")),
    "evenly_chosen": evenly_chosen,
    "short_name": short_name,
    "layer_title": layer_title,
}
ENVIRONMENT.globals["file"] = lambda name: Markup((TEMPLATES / name).read_text(encoding="utf-8"))
ENVIRONMENT.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
