"""The results of several runs as one table."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.table import Table
from rich.text import Text

from moe_ffn.data.prepare import WORSE_THAN_UNIGRAM
from moe_ffn.files import write_whole
from moe_ffn.layer_names import is_inner
from moe_ffn.metrics.table import LAYER_METRICS
from moe_ffn.report.html import NONE
from moe_ffn.report.tables import layer_mean
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import FACTS_FILE, METRICS_FILE, SUMMARY_FILE, named_run_folder
from moe_ffn.runs.reader import Run, read_run

TEXT_COLUMNS = ("config", "guesses", "precision")
MEASURES = [LAYER_METRICS[k] for k in ("max_violation", "experts_per_token", "dropped_fraction")]
COLUMNS = (*TEXT_COLUMNS, "loss", *(m.label for m in MEASURES), "MFLOPs", "tokens/s")
LEGEND = (
    "loss: validation, nats per guessed token, comparable only where the same is guessed; MaxVio: "
    f"{MEASURES[0].formula}, mean of the layers, validation; experts: per token, "
    "likewise; dropped: share of the pairs, last row of training; MFLOPs: forward, per token; tokens/s: "
    "of the fastest row of training, since other work on the machine only slows"
)

_SPEED = "train/tokens_per_second"


@dataclass(frozen=True)
class Result:
    """One run; None where a block routes nothing, or where what was written down of it is lost."""

    name: str
    causal: bool
    precision: str | None
    """The number format it was trained in."""
    loss: float | None
    """None where training diverged, too."""
    max_violation: float | None
    experts_per_token: float | None
    dropped_fraction: float | None
    flops_per_token: float | None
    tokens_per_second: float | None
    """None where it ended before its first row, too."""
    unigram_loss: float | None
    """What a model that knows only the frequencies of tokens scores on the same split."""
    lost: str = ""
    """What its files lack, as `summary.json lacks routing`; empty where nothing is lost."""

    def cells(self) -> list[str]:
        """One row, in the order of `COLUMNS`."""
        flops = None if self.flops_per_token is None else self.flops_per_token / 1e6
        return [
            self.name,
            "next" if self.causal else "masked",
            self.precision or NONE,
            _number(self.loss, ".4f"),
            *(_number(getattr(self, metric.key), metric.form) for metric in MEASURES),
            _number(flops, ".2f"),
            _number(self.tokens_per_second, ",.0f"),
        ]

    @property
    def is_worse_than_unigram(self) -> bool:
        return (
            self.loss is not None
            and self.unigram_loss is not None
            and self.loss > self.unigram_loss
        )


def read_result(name: str, config: TrainConfig) -> Result:
    """What a finished run wrote down; what its files have lost is absent.

    Raises:
        ConfigError: its folder is no run's any more, or a file in it cannot be read.
    """
    run = read_run(named_run_folder(config), has_ended=True)
    speeds = filter(math.isfinite, run.series(_SPEED).values)
    return Result(
        name=name,
        causal=config.model.causal,
        precision=run.facts.precision if run.facts.is_whole else None,
        loss=run.summary.validation_loss,
        max_violation=layer_mean(run, "max_violation"),
        experts_per_token=layer_mean(run, "experts_per_token"),
        dropped_fraction=_last_dropped_fraction(run),
        flops_per_token=run.facts.flops_per_token,
        tokens_per_second=max(speeds, default=None),
        unigram_loss=run.summary.unigram_loss,
        lost="; ".join(_lost(run)),
    )


def _lost(run: Run) -> Iterator[str]:
    """What the files of a run should have, and do not."""
    summary, facts = run.summary, run.facts
    is_kept = {
        SUMMARY_FILE: {
            "validation_loss": summary.has("validation_loss"),
            "unigram_loss": summary.unigram_loss is not None,
            "routing": summary.has("routing")
            and all(layer.has(m.key) for layer in summary.routing.values() for m in MEASURES[:2]),
        },
        FACTS_FILE: {
            "precision": facts.is_whole,
            "flops_per_token": facts.flops_per_token is not None,
        },
        # A run that max_time ended before its first row has none.
        METRICS_FILE: {
            _SPEED: any(map(math.isfinite, run.series(_SPEED).values))
            or summary.tokens_per_second == 0
        },
    }
    for file, keys in is_kept.items():
        lacking = [key for key, kept in keys.items() if not kept]
        if lacking:
            yield f"{file} lacks {', '.join(lacking)}"


def comparison_table(results: Sequence[Result]) -> Table:
    """Runs that guess next tokens first, each kind by its loss."""
    # As text, or brackets in a name would be read as colours.
    caption = Text(legend(results), style="table.caption")
    table = Table(box=None, pad_edge=False, caption=caption, caption_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right")
    for result in in_order(results):
        table.add_row(*map(Text, result.cells()))
    return table


def write_markdown(results: Sequence[Result], path: Path) -> None:
    """The same table for a document.

    Raises:
        OSError: it cannot be written.
    """
    rows = [COLUMNS, ["---" if name in TEXT_COLUMNS else "---:" for name in COLUMNS]]
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


def _last_dropped_fraction(run: Run) -> float | None:
    """Of the last row that has it, mean of the layers, as MaxVio is."""
    found = [
        series
        for layer, measures in run.layers.items()
        if not is_inner(layer) and (series := measures.get("dropped_fraction"))
    ]
    last = max((series.steps[-1] for series in found), default=None)
    values = [series.values[-1] for series in found if series.steps[-1] == last]
    return fmean(values) if values and all(map(math.isfinite, values)) else None


def _number(value: float | None, form: str) -> str:
    return NONE if value is None else format(value, form)
