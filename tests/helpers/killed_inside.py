"""The training program, in which a signal comes at the worst moment.

python tests/helpers/killed_inside.py MOMENT SIGNAL NTH [OPTION...]
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pkgutil import resolve_name
from unittest.mock import patch

from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.train import main

MOMENTS = {
    # Called once for each group of parameters: after the first, half of them are updated.
    "update": "torch.optim.adam.adam",
    # Called with a file that is written but has no checksum and no name yet.
    "save": "moe_ffn.training.recovery.checkpoint_file._seal",
}


@contextmanager
def killing(moment: str, signum: signal.Signals, nth: int) -> Iterator[None]:
    """Within, this process gets a signal in the n-th of such moments."""
    original: Callable[..., object] = resolve_name(MOMENTS[moment])
    calls = 0

    def wrapped(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        result = original(*args, **kwargs)
        if calls == nth:
            os.kill(os.getpid(), signum)
        return result

    with patch(MOMENTS[moment], wrapped):
        yield


if __name__ == "__main__":
    moment, name, nth = sys.argv[1:4]
    del sys.argv[1:4]
    with killing(moment, signal.Signals[name], int(nth)):
        raise SystemExit(exit_on_bad_input(main))
