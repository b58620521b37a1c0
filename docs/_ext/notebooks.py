"""Notebooks of docs/notebooks: run in this process, without a Jupyter kernel, and shown as pages.

A cell may begin with `%%writefile NAME`; no other magic is used.
"""

from __future__ import annotations

import ast
import io
import json
import logging
import re
import tempfile
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch

SCRIPT = "../_static/plotly.js"
"""Script of the figures, from a page of docs/notebooks."""

LONG = 12
"""Maximum lines of printed output that are shown unfolded."""


@dataclass(frozen=True)
class Ran:
    """A cell that was run."""

    kind: str
    """`markdown` or `code`."""
    source: str
    printed: str = ""
    value: Any = None
    """Value of the last expression."""


def run_notebook(path: Path, names: dict[str, Any]) -> Iterator[Ran]:
    """Run the cells of a notebook in the current folder, one after the other; `names` are its variables."""
    torch.set_num_threads(1)  # models this small are slower on several threads
    names["__name__"] = "__main__"
    for number, cell in enumerate(json.loads(path.read_text(encoding="utf-8"))["cells"]):
        source = "".join(cell["source"])
        written = re.match(r"%%writefile (\S+)\n", source)
        if cell["cell_type"] != "code":
            yield Ran("markdown", source)
        elif written is not None:
            Path(written[1]).write_text(source[written.end() :], encoding="utf-8")
            yield Ran("code", source)
        else:
            printed = io.StringIO()
            with redirect_stdout(printed), redirect_stderr(io.StringIO()):
                value = run_cell(source, f"{path.name}, cell {number}", names)
            yield Ran("code", source, printed.getvalue(), value)


def run_cell(source: str, where: str, names: dict[str, Any]) -> Any:
    """Run Python, and return the value of its last statement; None unless that is an expression."""
    tree = ast.parse(source, where)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, where, "exec"), names)
    if isinstance(last, ast.Expr):
        return eval(compile(ast.Expression(last.value), where, "eval"), names)
    return None


def html_of(value: Any) -> str:
    """Return what a notebook shows for a value, with colours that suit light and dark pages."""
    if hasattr(value, "to_plotly_json"):
        grid = {"gridcolor": "#8884", "linecolor": "#8884", "zerolinecolor": "#8884"}
        clear = dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), "rgba(0,0,0,0)")
        value.update_layout(font_color="#888", xaxis=grid, yaxis=grid, autosize=True, **clear)
        options = {"responsive": True, "displayModeBar": False}
        return value.to_html(full_html=False, include_plotlyjs=SCRIPT, config=options)
    shown = value._repr_html_() if hasattr(value, "_repr_html_") else None
    # Files of a run are not part of the site.
    shown = re.sub(r'<a href="(?!https?:)[^>]*>.*?</a>', "", shown or "")
    return shown or f"<pre>{escape(repr(value))}</pre>"


def _shown(cell: Ran) -> str:
    """Return a cell with its output in Markdown."""
    if cell.kind == "markdown":
        return cell.source
    output = ""
    if text := cell.printed.strip("\n"):
        lines = len(text.splitlines())
        output = f"<pre>{escape(text)}</pre>"
        if lines > LONG:
            output = f"<details><summary>{lines} lines of output</summary>{output}</details>"
    if cell.value is not None:
        output += html_of(cell.value)
    code = f"```python\n{cell.source.rstrip()}\n```"
    if not output:
        return code
    return f"{code}\n\n``````{{raw}} html\n<div class='output'>\n{output}\n</div>\n``````"


def as_markdown(path: Path) -> str:
    """Run a notebook in an empty folder, and return it with its outputs as a page."""
    logging.disable(logging.WARNING)  # progress of training, which other libraries print
    try:
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            parts = [*map(_shown, run_notebook(path, {}))]
    finally:
        logging.disable(logging.NOTSET)
    return "\n\n".join(parts) + "\n"


def on_source_read(app: Any, docname: str, source: list[str]) -> None:
    path = Path(app.env.doc2path(docname))
    if path.suffix == ".ipynb":
        source[0] = as_markdown(path)


def copy_plotly(app: Any) -> None:
    """Write the script of the figures next to the site's own."""
    from plotly.offline import get_plotlyjs

    folder = Path(app.outdir) / "_static"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plotly.js").write_text(get_plotlyjs(), encoding="utf-8")


def setup(app: Any) -> dict[str, bool]:
    app.connect("source-read", on_source_read, priority=100)
    app.connect("builder-inited", copy_plotly)
    return {"parallel_read_safe": True}
