"""How a program ends: its exit code, a mistake as one line on stderr, and output that cannot be written."""

from __future__ import annotations

import io
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from moe_ffn.config.environment import LaunchError, is_first_here, is_first_rank, is_under_torchrun
from moe_ffn.config.errors import ConfigError, printable, shorten
from moe_ffn.files import reason
from moe_ffn.kernels.memory import out_of_memory

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_DIVERGED = 3
"""Too many steps in a row had to be skipped."""
EXIT_SIGNAL = 128
"""To which the number of the signal is added, as shells do: 130 for Ctrl-C, 143 for SIGTERM."""
EXIT_INTERRUPTED = EXIT_SIGNAL + 2

SECONDS_TO_SPEAK = 20.0
"""That a process waits which says nothing itself."""

MAX_LINES = 3
"""Mistakes that are printed: the first are often the cause of the others."""

_ENDING = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]


def exit_on_bad_input(main: Callable[[Sequence[str]], int]) -> int:
    """Run `main` on the command line; a ConfigError becomes up to three lines and exit code 2.

    Ctrl-C, SIGTERM and SIGHUP end it without a traceback, and what it has half-written is removed. Output
    that cannot be written ends nothing: of a reader that went away (`| head`) nothing is said, of a full
    disk a sentence at the end, with exit code 1.

    Returns:
        the exit code, that of a SystemExit too.
    """
    for name in ("COLUMNS", "LINES"):
        if not os.environ.get(name, "1").strip("0"):  # rich would print nothing to a width of 0
            del os.environ[name]
    files = keep_printing()
    try:
        code = _exit_code(main)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    return EXIT_FAILED if _say_lost(files) and not code else code


def _exit_code(main: Callable[[Sequence[str]], int]) -> int:
    try:
        with _signals_as_exits():
            return main(sys.argv[1:])
    except ConfigError as error:
        lines = [shorten(line, 600) for line in str(error).split("\n")]
        if len(lines) > MAX_LINES:
            rest = len(lines) - (MAX_LINES - 1)
            lines[MAX_LINES - 1 :] = [f"and {rest} more mistakes; fix these first"]
        # Once for each machine, whose processes find the same: another may lack a file that this one has.
        if is_first_here() or isinstance(error, LaunchError):
            for line in lines:
                print(f"error: {printable(line)}", file=sys.stderr)
        elif is_under_torchrun():
            # torchrun ends all others with the first that ends: it might be before that one has spoken.
            time.sleep(SECONDS_TO_SPEAK)
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
def signals_blocked() -> Iterator[None]:
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
def _signals_as_exits() -> Iterator[None]:
    """Within, signals that would end the process at once raise SystemExit, so that `finally` is heard."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {signum: signal.signal(signum, _exit) for signum in _ENDING}
    try:
        yield
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _exit(signum: int, frame: object) -> None:
    raise SystemExit(EXIT_SIGNAL + signum)


class OutputFile(io.FileIO):
    """An open file descriptor to which every write succeeds, whether or not the bytes can be written."""

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


def keep_printing() -> Mapping[str, OutputFile]:
    r"""Put streams in the place of this process's own that never fail, until its very end.

    A stream that was closed (`>&-`) goes nowhere. What the encoding of a stream lacks is printed as an
    escape, `\u2423`.

    Returns:
        the files behind stdout and stderr, by these names; none where the caller of the program has put
        a stream of its own there, which stays.
    """
    # Closed descriptors are opened, or a file of the run would get their number, and what C code prints.
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    files: dict[str, OutputFile] = {}
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: PTH123, SIM115
        elif stream is getattr(sys, f"__{name}__") and isinstance(stream, io.TextIOWrapper):
            stream.flush()
            files[name] = OutputFile(stream.fileno())
            setattr(sys, name, _like(stream, files[name]))
    return files


def _like(stream: io.TextIOWrapper, file: OutputFile) -> io.TextIOWrapper:
    """A stream that writes to `file` as `stream` would."""
    for_any_character = ("replace", "ignore", "xmlcharrefreplace", "namereplace")
    return io.TextIOWrapper(
        # Typed as buffers alone, but what has no buffer (python -u) works as Python's own does.
        file if stream.write_through else io.BufferedWriter(file),
        encoding=stream.encoding,
        errors=stream.errors if stream.errors in for_any_character else "backslashreplace",
        line_buffering=stream.line_buffering,
        write_through=stream.write_through,
    )


def _say_lost(files: Mapping[str, OutputFile]) -> bool:
    """Whether output could not be written; then a sentence on the other stream says so."""
    sys.stdout.flush()
    sys.stderr.flush()
    lost = {name: file.problem for name, file in files.items() if file.problem is not None}
    for name, problem in lost.items():
        own, other = ("output", "stderr") if name == "stdout" else ("error", "stdout")
        sentence = f"error: standard {own}: {reason(problem)}; not all that was printed is there"
        print(sentence, file=getattr(sys, other), flush=True)
    return bool(lost)


def announce_import(*packages: str) -> None:
    """`importing lightning ...`, on stderr, of those not imported yet; of several ranks, by the first.

    Call it once nothing but the work itself is left: what answers a mistake, or `--help`, says nothing else.
    """
    awaited = [name for name in packages if name not in sys.modules]
    if awaited and is_first_rank():
        print(f"importing {' and '.join(awaited)} ...", file=sys.stderr, flush=True)
