"""Exit codes, and a mistake as one line on stderr; needs neither torch nor YAML."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from experiments.memory import out_of_memory
from experiments.standard_streams import keep_printing
from moe_ffn.errors import ConfigError, printable, without_middle

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_DIVERGED = 3
"""Too many steps in a row had to be skipped."""
EXIT_SIGNAL = 128
"""To which the number of the signal is added, as shells do: 130 for Ctrl-C, 143 for SIGTERM."""
EXIT_INTERRUPTED = EXIT_SIGNAL + 2

MAX_LINES = 3
"""What is said of one command: the first mistakes are often the cause of the others."""

_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def exit_on_bad_input(main: Callable[[Sequence[str]], int]) -> int:
    """Run `main` on the command line; a ConfigError becomes up to three lines and exit code 2.

    Ctrl-C, SIGTERM and SIGHUP end it without a traceback, and what it has half-written is removed. Output
    that nobody takes ends nothing: of a reader that went away (`| head`) nothing is said, of a full disk a
    sentence at the end, with exit code 1.
    """
    _forget_no_width()
    streams = keep_printing()
    try:
        code = _exit_code(main)
    except SystemExit as end:
        if streams.say_lost() and not end.code:
            return EXIT_FAILED
        raise
    return EXIT_FAILED if streams.say_lost() and not code else code


def _forget_no_width() -> None:
    """A terminal without columns is one whose width nobody knows, to which rich would print nothing."""
    for name in ("COLUMNS", "LINES"):
        if os.environ.get(name, "") and not os.environ[name].strip("0"):
            del os.environ[name]


def _exit_code(main: Callable[[Sequence[str]], int]) -> int:
    try:
        with _ending_cleanly():
            return main(sys.argv[1:])
    except ConfigError as error:
        lines = [without_middle(line) for line in str(error).split("\n")]
        if len(lines) > MAX_LINES:
            rest = len(lines) - (MAX_LINES - 1)
            lines[MAX_LINES - 1 :] = [f"and {rest} more mistakes; mend these first"]
        for line in lines:
            print(f"error: {printable(line)}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except (MemoryError, OSError, RuntimeError) as error:
        if not (sentence := out_of_memory(error)):
            raise
        print(f"error: {sentence}", file=sys.stderr)
        return EXIT_FAILED
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED


@contextmanager
def undisturbed() -> Iterator[None]:
    """Signals wait until the block ends: an import that is interrupted may leave half a module behind."""
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, *_ENDING})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _ending_cleanly() -> Iterator[None]:
    """Within, signals that would end the process at once raise SystemExit, so that `finally` is heard."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.signal(signum, _end) for signum in _ENDING}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _end(signum: int, frame: object) -> None:
    raise SystemExit(EXIT_SIGNAL + signum)
