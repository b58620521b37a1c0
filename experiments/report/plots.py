"""Where the plots stand on the page, and what page.js draws there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from experiments.report.figures import Plot, to_json
from experiments.report.markup import text


class PlotBook:
    """Collects the plots of a page while their places are written; `content` is id -> choices."""

    def __init__(self) -> None:
        self.content: dict[str, list[dict[str, Any]]] = {}

    def place(self, plots: Sequence[Plot]) -> str:
        """The HTML of a grid of plots; empty without any."""
        if not plots:
            return ""
        return f'<div class="plots">\n{"".join(map(self._figure, plots))}</div>\n'

    def _figure(self, plot: Plot) -> str:
        name = f"plot-{len(self.content)}"
        self.content[name] = [to_json(figure) for figure in plot.figures.values()]
        height = self.content[name][0]["layout"]["height"]
        note = (
            f'<figcaption class="quiet small">{text(plot.note)}</figcaption>' if plot.note else ""
        )
        return (
            f"<figure{' class=wide' if plot.is_wide else ''}><h3>{text(plot.title)}"
            f"{self._choice(plot, name)}</h3>"
            f'<div class="plot" id="{name}" style="min-height:{height}px" role="img" '
            f'aria-label="{text(plot.title)}"></div>{note}</figure>\n'
        )

    def _choice(self, plot: Plot, name: str) -> str:
        if len(plot.figures) == 1:
            return ""
        options = "".join(
            f'<option value="{number}">{text(choice)}</option>'
            for number, choice in enumerate(plot.figures)
        )
        return f' <select aria-label="{plot.choice}" data-plot="{name}">{options}</select>'
