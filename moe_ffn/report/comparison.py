"""The results of several runs as one table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table
from rich.text import Text

from moe_ffn.files import write_whole
from moe_ffn.metrics.functional import WORSE_THAN_UNIGRAM
from moe_ffn.report.html import NONE, finite, number
from moe_ffn.report.tables import RUN_NUMBERS, run_legend
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import FACTS_FILE, METRICS_FILE, SUMMARY_FILE, named_run_folder
from moe_ffn.runs.reader import read_run

TEXTS = ("config", "guesses", "precision")
NUMBERS = ("loss", "MaxVio", "experts", "dropped", "MFLOPs", "tokens/s")
COLUMNS = (*TEXTS, *NUMBERS)
LEGEND = run_legend(NUMBERS)


@dataclass(frozen=True)
class Result:
    """One run as a row."""

    name: str
    causal: bool
    precision: str | None
    """The number format it was trained in; None where that is lost."""
    numbers: Mapping[str, float | None]
    """By their columns; None or absent where a block routes nothing, where training diverged or ended before
    its first row, and where what was written down is lost."""
    unigram_loss: float | None = None
    """What a model that knows only the frequencies of tokens scores on the same split."""
    lost: str = ""
    """What its files lack, as `summary.json lacks routing`; empty where nothing is lost."""

    @property
    def loss(self) -> float | None:
        return self.numbers.get("loss")

    def cells(self) -> list[str]:
        """One row, in the order of `COLUMNS`."""
        texts = [self.name, "next" if self.causal else "masked", self.precision or NONE]
        return texts + [number(self.numbers.get(name), RUN_NUMBERS[name].form) for name in NUMBERS]

    @property
    def is_worse_than_unigram(self) -> bool:
        unigram = self.unigram_loss
        return self.loss is not None and unigram is not None and self.loss > unigram


def read_result(name: str, config: TrainConfig) -> Result:
    """What a finished run wrote down; what its files have lost is absent.

    Raises:
        ConfigError: its folder is no run's any more, or a file in it cannot be read.
    """
    run = read_run(named_run_folder(config), has_ended=True)
    summary, facts = run.summary, run.facts
    numbers = {name: finite(RUN_NUMBERS[name].value(run)) for name in NUMBERS}
    has_routing = summary.has("routing") and all(
        layer.has(key)
        for layer in summary.routing.values()
        for key in ("max_violation", "experts_per_token")
    )
    # What the files of a run should have.
    is_kept = {
        SUMMARY_FILE: {
            "validation_loss": summary.has("validation_loss"),
            "unigram_loss": summary.unigram_loss is not None,
            "routing": has_routing,
        },
        FACTS_FILE: {
            "precision": facts.is_whole,
            "flops_per_token": facts.flops_per_token is not None,
        },
        # A run that max_time ended before its first row has no speed.
        METRICS_FILE: {
            "train/tokens_per_second": numbers["tokens/s"] is not None
            or summary.tokens_per_second == 0
        },
    }
    lost = [
        f"{file} lacks {', '.join(key for key, kept in keys.items() if not kept)}"
        for file, keys in is_kept.items()
        if not all(keys.values())
    ]
    return Result(
        name=name,
        causal=config.model.causal,
        precision=facts.precision if facts.is_whole else None,
        numbers=numbers,
        unigram_loss=summary.unigram_loss,
        lost="; ".join(lost),
    )


def comparison_table(results: Sequence[Result]) -> Table:
    """Runs that guess next tokens first, each kind by its loss."""
    # As text, or brackets in a name would be read as colours.
    caption = Text(legend(results), style="table.caption")
    table = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in TEXTS else "right")
    for result in in_order(results):
        table.add_row(*map(Text, result.cells()))
    return table


def write_markdown(results: Sequence[Result], path: Path) -> None:
    """Write the table as Markdown.

    Raises:
        OSError: it cannot be written.
    """
    rows = [COLUMNS, ["---" if name in TEXTS else "---:" for name in COLUMNS]]
    rows += [[*map(_plain, result.cells())] for result in in_order(results)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    write_whole(path, "\n".join([*lines, "", _plain(legend(results)), ""]))


def _plain(text: str) -> str:
    """`text` in Markdown without a meaning of its own: a run may be called `<b>` or `a|b`."""
    return re.sub(r"[\\|<>&`*\[\]]|(?<!\w)_|_(?!\w)", lambda found: f"&#{ord(found[0])};", text)


def legend(results: Sequence[Result]) -> str:
    """What the columns are, and which runs have learned less than how often each token occurs."""
    worse = [result.name for result in in_order(results) if result.is_worse_than_unigram]
    return f"{LEGEND}; {WORSE_THAN_UNIGRAM}: {', '.join(worse)}" if worse else LEGEND


def in_order(results: Sequence[Result]) -> list[Result]:
    return sorted(
        results,
        key=lambda r: (not r.causal, r.loss is None, 0.0 if r.loss is None else r.loss),
    )
