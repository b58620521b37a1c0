"""The page of a run as text without tags, and the figures in it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from html import unescape
from pathlib import Path
from typing import Any
from unittest.mock import patch

from moe_ffn.report.page import report_html
from moe_ffn.runs.reader import read_runs


class Written:
    """A page as text without tags, and the figures in it by their titles."""

    def __init__(self, *folders: Path) -> None:
        # The script of plotly is megabytes, which these tests would read again and again.
        with patch("moe_ffn.report.plots.get_plotlyjs", return_value=""):
            self.html = report_html(read_runs(folders))
        found = re.search(r'id="plots">(.*?)</script>', self.html, re.DOTALL)
        assert found
        plots = json.loads(found[1])
        self.size_of_data = len(found[1])
        titles = re.findall(r'class="plot" .*? aria-label="([^"]*)"', self.html)
        self.figures: dict[str, list[dict[str, Any]]] = {
            unescape(title): figures for title, figures in zip(titles, plots.values(), strict=True)
        }
        body = self.html[self.html.index("<body>") : self.html.index('<script type="application')]
        self.body = body
        self.text = re.sub(r"\s+", " ", unescape(re.sub(r"<[^>]+>", " ", body)))

    def traces(self, title: str) -> dict[str, dict[str, Any]]:
        (figure,) = self.figures[title]
        return {trace["meta"]["name"]: trace for trace in figure["data"]}

    def of_one(self) -> dict[str, list[dict[str, Any]]]:
        """The plots without a choice."""
        return {title: figures for title, figures in self.figures.items() if len(figures) == 1}


NO_PLOTS: dict[str, list[Any]] = {
    section: []
    for section in (
        *("curves", "more_curves", "loads", "measures", "more_measures", "coactivation"),
        *("answer", "tuning"),
    )
}


def without_plots(*folders: Path) -> Written:
    """The page without its plots, which take a second to draw."""
    with (
        patch("moe_ffn.report.plots.plots_of_run", return_value=NO_PLOTS),
        patch("moe_ffn.report.studies.comparison_page.plots_of_arms", return_value=NO_PLOTS),
    ):
        return Written(*folders)


def row_of(text: str, cells: Sequence[object]) -> bool:
    return " ".join(map(str, cells)) in text
