"""`metrics.jsonl`: one line for every row of metrics, as soon as it is known."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only

from moe_ffn.training.monitoring.json_lines import STEP, JsonLines


class MetricsFile(Logger):
    """Lightning's logger over a log of rows."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.file = JsonLines(path, is_synced=False)

    @property
    def name(self) -> str:
        return "metrics"

    @property
    def version(self) -> str:
        return ""

    def log_hyperparams(self, params: Any, *args: Any, **kwargs: Any) -> None:
        """Nothing: a run's `config.yaml` has them."""

    @rank_zero_only
    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        """Add a row."""
        self.file.add([{STEP: step, **metrics}])

    @rank_zero_only
    def save(self) -> None:
        """Return when every row is on the disk, or was said not to be."""
        self.file.sync()

    @rank_zero_only
    def finalize(self, status: str) -> None:
        self.save()
