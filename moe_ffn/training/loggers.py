"""Where metrics go: always a CSV, and wandb unless it is off or absent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger

from moe_ffn.training.wandb_run import WandbRun


class ColumnLogger(CSVLogger):
    """Lightning's CSV logger, for rows in which a value may be a list."""

    def log_metrics(self, metrics: Mapping[str, Any], step: int | None = None) -> None:
        super().log_metrics(columns(metrics), step)


def columns(row: Mapping[str, Any]) -> dict[str, Any]:
    """`{"load": [0.25, 0.75]}` as `{"load/expert_00": 0.25, "load/expert_01": 0.75}`."""
    flat: dict[str, Any] = {}
    for key, value in row.items():
        if isinstance(value, list):
            flat |= {f"{key}/expert_{e:02d}": share for e, share in enumerate(value)}
        else:
            flat[key] = value
    return flat


def csv_logger(run_dir: Path) -> ColumnLogger:
    """Writes `metrics.csv` in the run's folder, row by row."""
    return ColumnLogger(str(run_dir), name="", version="", flush_logs_every_n_steps=1)


def alert(loggers: Iterable[Logger], title: str, text: str) -> None:
    """Tell whoever may be far away, through wandb where it is online; elsewhere nothing happens.

    Neither raises nor waits for the network.
    """
    for logger in loggers:
        if isinstance(logger, WandbRun):
            logger.alert(title, text)


def close(loggers: Iterable[Logger], status: str = "success") -> None:
    """Write out what is pending. wandb's run ends here, so that a process may hold several.

    One that fails, as on a full disk, keeps no other from ending; the first error is raised then.

    Args:
        status: how the run ended, `success` or `failed`.
    """
    errors: list[Exception] = []
    for logger in loggers:
        try:
            logger.finalize(status)
        except Exception as error:
            errors.append(error)
        if isinstance(logger, WandbRun):
            logger.finish(status)
    if errors:
        raise errors[0]
