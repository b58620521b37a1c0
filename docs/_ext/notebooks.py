"""Notebooks of docs/notebooks: run in this process, without a Jupyter kernel, and shown as pages.

A code host shows the outputs that `pictures.py` stores in a notebook; the site shows those of its own build.
A cell may begin with `%%writefile NAME`; no other magic is used.
"""

from __future__ import annotations

import ast
import base64
import io
import json
import logging
import re
import tempfile
from collections.abc import Callable, Iterator
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import torch

FOLDER = Path(__file__).parents[1] / "notebooks"

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


def html_of(value: Any, text_color: str = "#888", script: str | bool = SCRIPT) -> str:
    """Return what a notebook shows for a value, with colours that suit light and dark pages."""
    if hasattr(value, "to_plotly_json"):
        grid = {"gridcolor": "#8884", "linecolor": "#8884", "zerolinecolor": "#8884"}
        clear = dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), "rgba(0,0,0,0)")
        value.update_layout(font_color=text_color, xaxis=grid, yaxis=grid, autosize=True, **clear)
        options = {"responsive": True, "displayModeBar": False}
        return value.to_html(full_html=False, include_plotlyjs=script, config=options)
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
    with temporary_runs():
        parts = [*map(_shown, run_notebook(path, {}))]
    return "\n\n".join(parts) + "\n"


@contextmanager
def temporary_runs() -> Iterator[None]:
    """Enter an empty folder, where training prints no progress of other libraries."""
    logging.disable(logging.WARNING)
    try:
        with tempfile.TemporaryDirectory() as folder, chdir(folder):
            yield
    finally:
        logging.disable(logging.NOTSET)


# -- outputs in the notebooks


def stored(path: Path, picture: Callable[[str], bytes]) -> str:
    """Run a notebook in the current folder, and return its JSON, as Jupyter saves it, with all outputs.

    Args:
        picture: returns HTML as PNG.
    """
    book = json.loads(path.read_text(encoding="utf-8"))
    number = 0
    for cell, ran in zip(book["cells"], run_notebook(path, {}), strict=True):
        if ran.kind == "code":
            number += 1
            cell["execution_count"] = number
            cell["outputs"] = outputs_of(ran, number, picture)
    return json.dumps(book, indent=1, ensure_ascii=False, sort_keys=True) + "\n"


def outputs_of(ran: Ran, number: int, picture: Callable[[str], bytes]) -> list[dict[str, Any]]:
    """Return the outputs of a cell; the middle of long text is left out."""
    outputs: list[dict[str, Any]] = []
    if lines := ran.printed.splitlines(keepends=True):
        if len(lines) > LONG:
            lines[9:-2] = [f"... {len(lines) - 11} lines ...\n"]
        outputs.append({"name": "stdout", "output_type": "stream", "text": lines})
    if ran.value is not None:
        data: dict[str, Any] = {"text/plain": [repr(ran.value)]}
        if is_drawn(ran.value):
            data = {
                "image/png": base64.b64encode(
                    picture(html_of(ran.value, "#222", script=True))
                ).decode()
            }
            data["text/plain"] = [f"<{type(ran.value).__name__}>"]
        result = {"data": data, "execution_count": number, "metadata": {}}
        outputs.append({**result, "output_type": "execute_result"})
    return outputs


def is_drawn(value: Any) -> bool:
    return hasattr(value, "to_plotly_json") or hasattr(value, "_repr_html_")


# -- the site


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
