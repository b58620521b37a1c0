"""What the loggers of a run, `metrics.csv` and wandb, have in common."""

from __future__ import annotations

from collections.abc import Iterable

from lightning.pytorch.loggers import Logger

from moe_ffn.training.wandb_run import WandbRun


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
