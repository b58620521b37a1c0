"""Standard output and error that end no program: what cannot be written is left out, and remembered."""

from __future__ import annotations

import io
import os
import select
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, TextIO

from moe_ffn.errors import reason

if TYPE_CHECKING:
    from _typeshed import ReadableBuffer


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
