"""The results of several runs as one table."""

from __future__ import annotations

import csv
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from rich.table import Table

from experiments.config import TrainConfig
from experiments.run_folder import (
    FACTS_FILE,
    METRICS_FILE,
    SUMMARY_FILE,
    named_run_folder,
)
from moe_ffn.data.unigram import WORSE_THAN_UNIGRAM
from moe_ffn.layer_names import is_inner

TEXT_COLUMNS = ("config", "guesses", "precision")
COLUMNS = (*TEXT_COLUMNS, "loss", "MaxVio", "experts", "dropped", "MFLOPs", "tokens/s")
LEGEND = (
    "loss: validation, nats per guessed token, comparable only where the same is guessed; MaxVio: the "
    "busiest expert over the even share, minus 1, mean of the layers, validation; experts: per token, "
    "likewise; dropped: share of the pairs, last row of training; MFLOPs: forward, per token; tokens/s: "
    "of the fastest row of training, since other work on the machine only slows"
)

_DROPPED = re.compile(r"routing/(.+)/dropped_fraction")


@dataclass(frozen=True)
class Result:
    """One run; None where a block routes nothing."""

    name: str
    causal: bool
    precision: str
    """The number format it was trained in."""
    loss: float | None
    """None where training diverged."""
    max_violation: float | None
    experts_per_token: float | None
    dropped_fraction: float | None
    flops_per_token: int
    tokens_per_second: float
    unigram_loss: float
    """What a model that knows only the frequencies of tokens scores on the same split."""

    def cells(self) -> list[str]:
        """One row, in the order of `COLUMNS`."""
        return [
            self.name,
            "next" if self.causal else "masked",
            self.precision,
            _number(self.loss, ".4f"),
            _number(self.max_violation, ".2f"),
            _number(self.experts_per_token, ".2f"),
            _number(self.dropped_fraction, ".1%"),
            f"{self.flops_per_token / 1e6:.2f}",
            f"{self.tokens_per_second:,.0f}",
        ]


def read_result(name: str, config: TrainConfig) -> Result:
    """What a finished run wrote down."""
    folder = named_run_folder(config)
    summary = json.loads((folder / SUMMARY_FILE).read_text(encoding="utf-8"))
    facts = json.loads((folder / FACTS_FILE).read_text(encoding="utf-8"))
    with (folder / METRICS_FILE).open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    layers = [values for layer, values in summary["routing"].items() if not is_inner(layer)]
    return Result(
        name=name,
        causal=config.model.causal,
        precision=facts["precision"],
        loss=summary["validation_loss"],
        max_violation=fmean(v["max_violation"] for v in layers) if layers else None,
        experts_per_token=fmean(v["experts_per_token"] for v in layers) if layers else None,
        dropped_fraction=_last_dropped_fraction(rows),
        flops_per_token=facts["flops_per_token"],
        tokens_per_second=max(
            float(row["train/tokens_per_second"]) for row in rows if row["train/tokens_per_second"]
        ),
        unigram_loss=summary["unigram_loss"],
    )


def comparison_table(results: Sequence[Result]) -> Table:
    """Runs that guess next tokens first, each kind by its loss."""
    table = Table(box=None, pad_edge=False, caption=legend(results), caption_justify="left")
    for name in COLUMNS:
        table.add_column(name, justify="left" if name in TEXT_COLUMNS else "right")
    for result in in_order(results):
        table.add_row(*result.cells())
    return table


def write_markdown(results: Sequence[Result], path: Path) -> None:
    """The same table for a document."""
    rows = [COLUMNS, ["---" if name in TEXT_COLUMNS else "---:" for name in COLUMNS]]
    rows += [result.cells() for result in in_order(results)]
    lines = [f"| {' | '.join(row)} |" for row in rows]
    path.write_text("\n".join([*lines, "", legend(results), ""]), encoding="utf-8")


def legend(results: Sequence[Result]) -> str:
    """What the columns are, and which runs have learned less than how often each token occurs."""
    worse = [r.name for r in in_order(results) if r.loss is not None and r.loss > r.unigram_loss]
    return f"{LEGEND}; {WORSE_THAN_UNIGRAM}: {', '.join(worse)}" if worse else LEGEND


def in_order(results: Sequence[Result]) -> list[Result]:
    return sorted(
        results,
        key=lambda r: (not r.causal, r.loss is None, 0.0 if r.loss is None else r.loss),
    )


def _last_dropped_fraction(rows: Sequence[Mapping[str, str]]) -> float | None:
    """Of the last row that has it, mean of the layers, as MaxVio is."""
    for row in reversed(rows):
        values = [
            float(value)
            for key, value in row.items()
            if value and (match := _DROPPED.fullmatch(key)) and not is_inner(match[1])
        ]
        if values:
            return fmean(values)
    return None


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
