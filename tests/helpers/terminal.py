"""Programs in a terminal of their own."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import suppress

from tests.helpers.tiny_runs import REPOSITORY, environment, python_words


def on_terminal(program: str, *argv: str, interrupt_at: bytes | None = None) -> tuple[int, str]:
    """Run a program; return its exit code and the characters that it sent to its terminal.

    Args:
        interrupt_at: pattern in what it sent after which Ctrl-C is pressed once.
    """
    own, its = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, *python_words(program), *argv],
        cwd=REPOSITORY,
        env=environment(TERM="xterm", COLUMNS="100"),
        stdin=its,
        stdout=its,
        stderr=its,
        start_new_session=True,
    )
    os.close(its)
    sent = b""
    with suppress(OSError):  # the last process on it has ended
        while block := os.read(own, 65_536):
            sent += block
            if interrupt_at is not None and re.search(interrupt_at, sent):
                process.send_signal(signal.SIGINT)
                interrupt_at = None
    os.close(own)
    return process.wait(timeout=60), sent.decode()
