"""Exit codes, and a mistake as one line on stderr; needs neither torch nor YAML."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence

from moe_ffn.errors import ConfigError

EXIT_FAILED = 1
EXIT_BAD_INPUT = 2
EXIT_DIVERGED = 3
"""Too many steps in a row had to be skipped."""
EXIT_SIGNAL = 128
"""To which the number of the signal is added, as shells do: 130 for Ctrl-C, 143 for SIGTERM."""
EXIT_INTERRUPTED = EXIT_SIGNAL + 2

MOST_LINES = 3
"""What is said of one command: the first mistakes are often the cause of the others."""


def exit_on_bad_input(main: Callable[[Sequence[str]], int]) -> int:
    """Run `main` on the command line; a ConfigError becomes up to three lines and exit code 2."""
    try:
        return main(sys.argv[1:])
    except ConfigError as error:
        lines = str(error).splitlines()
        if len(lines) > MOST_LINES:
            rest = len(lines) - (MOST_LINES - 1)
            lines[MOST_LINES - 1 :] = [f"and {rest} more mistakes; mend these first"]
        for line in lines:
            print(f"error: {line}", file=sys.stderr)
        return EXIT_BAD_INPUT
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return EXIT_INTERRUPTED
