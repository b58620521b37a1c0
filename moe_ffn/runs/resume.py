"""Going on with a run: which run, from which of its checkpoints, and whether that may be."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moe_ffn.commands import command
from moe_ffn.config_files import read_config, read_yaml
from moe_ffn.errors import ConfigError
from moe_ffn.runs.config import TrainConfig
from moe_ffn.runs.folder import (
    REPORT_FILE,
    SUMMARY_FILE,
)
from moe_ffn.runs.record import differences


@dataclass(frozen=True)
class Resume:
    """A run that is to go on, and with which options."""

    folder: Path
    config: TrainConfig
    changes: Mapping[str, tuple[Any, Any]]
    """What differs from the run's own options: dotted key -> value before and now."""
    own: TrainConfig
    """The options in the run's folder."""


def own_config(path: Path, *, trust_code: bool = False) -> TrainConfig:
    """That of a run, which holds every option; of a file that was cut short the rest would be defaults.

    Raises:
        ConfigError: it cannot be read, or an option is not there, or it names code that nobody trusts.
    """
    config = read_config(path, TrainConfig, trust_code=trust_code)
    given = read_yaml(path, where=f"'{path}'")
    lacking = [
        key for key, (found, _) in differences(given, config.to_dict()).items() if found is None
    ]
    if lacking:
        more = f" and {len(lacking) - 1} more" if len(lacking) > 1 else ""
        raise ConfigError(
            f"'{path}' lacks {lacking[0]}{more}, so it was cut short, or is of another version; put back "
            "what it was"
        )
    return config


def _without_page(folder: Path) -> str:
    """What is said of a run that died between its summary and its page; empty of others."""
    if (folder / REPORT_FILE).is_file():
        return ""
    return f", but its page was not written: {command('report')} {folder}"


def is_finished(folder: Path) -> bool:
    return (folder / SUMMARY_FILE).is_file()
