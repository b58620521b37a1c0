"""How a program ends: its exit code, a mistake as one line on stderr, and output that nobody takes."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from moe_ffn.cli.memory import out_of_memory
from moe_ffn.errors import ConfigError, printable, reason, without_middle
from moe_ffn.ranks import is_first_rank

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

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
            lines[MAX_LINES - 1 :] = [f"and {rest} more mistakes; fix these first"]
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


class OutputFile(io.FileIO):
    """An open file descriptor to which every write succeeds, whether or not anybody takes the bytes."""

    def __init__(self, descriptor: int) -> None:
        super().__init__(descriptor, "w", closefd=False)
        self.problem: OSError | None = None
        """The last write that failed; a reader that goes away, such as `head`, has read enough."""

    def write(self, data: ReadableBuffer) -> int:
        """Write all of `data`, waiting where the descriptor is one that does not block."""
        everything = memoryview(data)
        left = everything
        try:
            while left:
                written = super().write(left)
                if written is None:
                    select.select([], [self], [])
                else:
                    left = left[written:]
        except BrokenPipeError:
            pass
        except OSError as error:
            self.problem = error
        return len(everything)


@dataclass(frozen=True)
class StandardStreams:
    """What a program prints to."""

    output: OutputFile | None
    error: OutputFile | None
    """None where the caller of the program has put something else in its place."""

    def say_lost(self) -> bool:
        """Whether something could not be written so far; then a sentence says so where it can be read."""
        sys.stdout.flush()
        sys.stderr.flush()
        lost = [
            (f"error: {name}: {reason(file.problem)}; not all that was printed is there", other)
            for name, file, other in (
                ("standard output", self.output, sys.stderr),
                ("standard error", self.error, sys.stdout),
            )
            if file is not None and file.problem is not None
        ]
        for sentence, stream in lost:
            print(sentence, file=stream, flush=True)
        return bool(lost)


def keep_printing() -> StandardStreams:
    r"""Put streams in the place of this process's own that never fail, until its very end.

    Those of a test or of a calling program stay as they are. A stream that was closed (`>&-`) goes nowhere.
    What the encoding of a stream lacks is printed as an escape, `\u2423`.
    """
    _occupy_standard_descriptors()
    sys.stdout, output = _unfailing(sys.stdout, sys.__stdout__)
    sys.stderr, error = _unfailing(sys.stderr, sys.__stderr__)
    return StandardStreams(output, error)


def _occupy_standard_descriptors() -> None:
    """Open what was closed (`2>&-`), or a file of the run would get that number, and what C code says."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)


_FOR_ANY_CHARACTER = ("replace", "ignore", "xmlcharrefreplace", "namereplace")
"""What else a person may have chosen for the characters that an encoding lacks (`PYTHONIOENCODING`)."""


def _unfailing(stream: TextIO | None, own: TextIO | None) -> tuple[TextIO, OutputFile | None]:
    if stream is None:
        return open(os.devnull, "w", encoding="utf-8"), None  # noqa: PTH123 - to the end
    if stream is not own or not isinstance(stream, io.TextIOWrapper):
        return stream, None
    stream.flush()
    file = OutputFile(stream.fileno())
    # Typed as buffers alone, but what has no buffer (python -u) works as Python's own does.
    below: io.BufferedWriter = file if stream.write_through else io.BufferedWriter(file)  # pyright: ignore
    replaced = io.TextIOWrapper(
        below,
        encoding=stream.encoding,
        errors=stream.errors if stream.errors in _FOR_ANY_CHARACTER else "backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )
    return replaced, file


def announce_import(*packages: str) -> None:
    """`importing lightning ...`, on stderr, of those not imported yet; of several ranks, by the first.

    Call it once nothing but the work itself is left: what answers a mistake, or `--help`, says nothing else.
    """
    awaited = [name for name in packages if name not in sys.modules]
    if awaited and is_first_rank():
        print(f"importing {' and '.join(awaited)} ...", file=sys.stderr, flush=True)
