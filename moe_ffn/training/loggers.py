"""Where metrics go: always a CSV, and wandb unless it is off or absent.

wandb never stands in the way of a run: without an account or a network the run is kept offline.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import CSVLogger, Logger

from moe_ffn.errors import first_line
from moe_ffn.training.config import WandbConfig

INIT_TIMEOUT_SECONDS = 8

_MODES = {
    "online": "online",
    "offline": "offline",
    "disabled": "disabled",
    "shared": "shared",
    "run": "online",
    "dryrun": "offline",
}
"""What WANDB_MODE may say, and what it means."""


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


def alert(loggers: Iterable[Logger], title: str, text: str) -> None:
    """Stub."""


def csv_logger(run_dir: Path) -> ColumnLogger:
    """Writes `metrics.csv` in the run's folder, row by row."""
    return ColumnLogger(str(run_dir), name="", version="", flush_logs_every_n_steps=1)


def wandb_logger(
    config: WandbConfig, run_dir: Path, tags: list[str], facts: Mapping[str, Any]
) -> tuple[Logger | None, str]:
    """The wandb logger, or None, and one line that says what a person can do with it.

    Args:
        facts: what is stored as the run's config: the resolved options, revision, parameter counts.
    """
    mode = _requested_mode(config)
    if mode == "disabled":
        return None, "wandb: off"
    wandb = _import_wandb()
    if wandb is None:
        return None, "wandb: not installed, metrics are in metrics.csv (pip install wandb)"
    wandb.setup(wandb.Settings(silent=True))
    if mode == "auto":
        mode = "online" if _is_logged_in(wandb) else "offline"
    run = _start(wandb, config, mode, run_dir, tags, facts)
    if run is None and mode == "online":
        mode = "offline"
        run = _start(wandb, config, mode, run_dir, tags, facts)
    if run is None:
        return None, "wandb: off, metrics are in metrics.csv"
    from lightning.pytorch.loggers import WandbLogger

    # Charts run over optimizer steps; wandb's own step counts rows, and starts anew when offline.
    run.define_metric("trainer/global_step")
    run.define_metric("*", step_metric="trainer/global_step")
    if mode == "online":
        return WandbLogger(experiment=run), f"wandb: online, {run.url}"
    folder = _relative(Path(run.dir).parent)
    return WandbLogger(experiment=run), f"wandb: {mode}; to upload: wandb sync {folder}"


def close(loggers: Iterable[Logger], status: str = "success") -> None:
    """Write out what is pending. wandb's run ends here, so that a process may hold several.

    Args:
        status: how the run ended, `success` or `failed`.
    """
    for logger in loggers:
        logger.finalize(status)
        finish = getattr(getattr(logger, "experiment", None), "finish", None)
        if finish is not None:
            finish(exit_code=0 if status == "success" else 1)


def _requested_mode(config: WandbConfig) -> str:
    """What the option says, or else WANDB_MODE, unset where it is empty or wandb would refuse it."""
    environment = os.environ.get("WANDB_MODE", "")
    if environment not in _MODES:
        os.environ.pop("WANDB_MODE", None)
        if environment:
            known = ", ".join(_MODES)
            print(f"wandb: WANDB_MODE '{environment}' is ignored; known: {known}", file=sys.stderr)
    return _MODES.get(environment, "auto") if config.mode == "auto" else config.mode


def _import_wandb() -> Any:
    """The wandb package; None where it is absent (a leftover `./wandb` folder is no package)."""
    try:
        import wandb
    except ImportError:
        return None
    return wandb if hasattr(wandb, "init") else None


def _is_logged_in(wandb: Any) -> bool:
    """Whether credentials are configured; neither asks for them nor for the network."""
    try:
        return wandb.login(prompt=False, verify=False)
    except (wandb.Error, ValueError):  # a malformed key
        return False


def _start(
    wandb: Any,
    config: WandbConfig,
    mode: str,
    run_dir: Path,
    tags: list[str],
    facts: Mapping[str, Any],
) -> Any:
    """A started run, or None, and a line on standard error, where wandb could not start."""
    try:
        return wandb.init(
            mode=mode,
            project=config.project,
            entity=config.entity,
            name=run_dir.name,
            dir=str(run_dir),
            tags=tags,
            config=dict(facts),
            settings=wandb.Settings(
                init_timeout=INIT_TIMEOUT_SECONDS, silent=True, console="off", x_disable_stats=True
            ),
        )
    except (wandb.Error, OSError, ValueError) as error:
        print(f"wandb: {mode} failed: {first_line(error)}", file=sys.stderr)
        return None


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
