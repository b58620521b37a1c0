"""Logging of the programs: one logger, `moe_ffn`, which writes plain messages to stderr."""

from __future__ import annotations

import argparse
import logging
import sys
from typing import Any

from moe_ffn.config.environment import is_first_rank

LOGGER = logging.getLogger("moe_ffn")


class _Formatter(logging.Formatter):
    """Format only the message; an error begins with `error: `, or with the `prefix` of its log record."""

    def format(self, record: logging.LogRecord) -> str:
        line = super().format(record)
        prefix = getattr(record, "prefix", "error")
        return f"{prefix}: {line}" if record.levelno >= logging.ERROR else line


class _Handler(logging.StreamHandler[Any]):
    """Handler that writes to the current `sys.stderr`, even if that is replaced later."""

    stream = property(lambda self: sys.stderr, lambda self, value: None)

    def __init__(self) -> None:
        super().__init__()
        self.setFormatter(_Formatter())
        self.addFilter(lambda record: record.levelno >= logging.ERROR or is_first_rank())


def set_up_logging() -> None:
    """Show the package's log from level INFO on the first rank, and only errors on other ranks."""
    if not any(isinstance(handler, _Handler) for handler in LOGGER.handlers):
        LOGGER.addHandler(_Handler())
        LOGGER.propagate = False
    LOGGER.setLevel(logging.INFO)


class SetLevel(argparse.Action):
    """Set the log level: DEBUG for `-v`, ERROR for `-q`; the default is INFO."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        is_verbose = option_string in ("-v", "--verbose")
        LOGGER.setLevel(logging.DEBUG if is_verbose else logging.ERROR)
