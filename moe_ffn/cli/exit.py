"""Exit codes and log of the programs; mistakes print a few lines to stderr, signals print no traceback."""

from __future__ import annotations

import argparse
import io
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from moe_ffn.config.environment import LaunchError, is_first_here, is_first_rank, is_under_torchrun
from moe_ffn.config.errors import ConfigError, printable, shorten
from moe_ffn.config.process_memory import out_of_memory

LOGGER = logging.getLogger("moe_ffn")
"""Logger of the whole package; the programs write its messages to stderr."""

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_DIVERGED = 3
"""Too many consecutive steps were skipped."""
EXIT_SIGNAL = 128
"""Added to the number of the signal, as in a shell: 130 for Ctrl-C, 143 for SIGTERM."""
EXIT_INTERRUPTED = EXIT_SIGNAL + 2

SILENT_RANK_SECONDS = 20.0
"""Seconds a silent rank waits before it exits."""

MAX_LINES = 6
"""Maximum number of lines for mistakes, since the first mistakes often cause the later ones."""

_EXIT_SIGNALS = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
"""Signals that kill the process by default; Windows has no SIGHUP."""


def exit_on_bad_input(main: Callable[[Sequence[str]], int]) -> int:
    """Run `main` on the command line; return its exit code, or that of a SystemExit.

    A ConfigError becomes at most `MAX_LINES` lines and exit code 2. Ctrl-C, SIGTERM and SIGHUP end it without
    a traceback, and half-written files are removed.
    """
    set_up_logging()
    prepare_streams()
    try:
        with _signals_as_exits():
            code = main(sys.argv[1:])
        sys.stdout.flush()
        return code
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BrokenPipeError:  # the reader, such as `head`, closed the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return EXIT_FAILED
    except ConfigError as error:
        _report(error)
        return EXIT_BAD_INPUT
    except (MemoryError, OSError, RuntimeError) as error:
        if not (sentence := out_of_memory(error)):
            raise
        LOGGER.error("%s", sentence)
        return EXIT_FAILED
    except KeyboardInterrupt:
        LOGGER.warning("interrupted")
        return EXIT_INTERRUPTED


def prepare_streams() -> None:
    """Escape characters that a stream cannot encode; replace a closed stream by the null device."""
    for name in ("COLUMNS", "LINES"):
        if not os.environ.get(name, "1").strip("0"):  # rich would print nothing at a width of 0
            del os.environ[name]
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _report(error: ConfigError) -> None:
    """Log the first mistakes, once per machine, since a file may be missing on one machine only."""
    lines = [shorten(line, 600) for line in str(error).split("\n")]
    if len(lines) > MAX_LINES:
        rest = len(lines) - (MAX_LINES - 1)
        lines[MAX_LINES - 1 :] = [f"and {rest} more mistakes; fix these first"]
    if is_first_here() or isinstance(error, LaunchError):
        for line in lines:
            LOGGER.error("%s", printable(line))
    elif is_under_torchrun():
        # torchrun kills all processes when one exits, perhaps before the first rank has logged the error.
        time.sleep(SILENT_RANK_SECONDS)


@contextmanager
def _signals_as_exits() -> Iterator[None]:
    """Raise SystemExit at the signals of `_EXIT_SIGNALS`, so that `finally` blocks run."""
    before = {signum: signal.signal(signum, _exit) for signum in _EXIT_SIGNALS}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _exit(signum: int, frame: object) -> None:
    raise SystemExit(EXIT_SIGNAL + signum)


# -- log


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
