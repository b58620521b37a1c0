"""`experiments.train`, in which a signal comes at the worst moment.

python -m experiments.selftest.killed_inside MOMENT SIGNAL NTH [OPTIONS OF experiments.train]

MOMENT is `update`, in the middle of the optimizer's arithmetic, or `save`, when a checkpoint is half on the
disk; of which NTH is counted from 1.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from unittest.mock import patch

from moe_ffn.cli.exit import exit_on_bad_input
from moe_ffn.cli.train import main

MOMENTS = {
    # Called once for each group of parameters: after the first, half of them are updated.
    "update": "torch.optim.adam.adam",
    # Called with a file that is written but has no checksum and no name yet.
    "save": "moe_ffn.training.recovery.checkpoint_file._seal",
}


def _main() -> int:
    moment, signal_name, nth = sys.argv[1:4]
    del sys.argv[1:4]
    signum = signal.Signals[signal_name]
    target = MOMENTS[moment]
    with patch(target, _then_kill(_resolve(target), int(nth), signum)):
        return exit_on_bad_input(main)


def _resolve(target: str) -> Callable[..., object]:
    from importlib import import_module

    module, _, name = target.rpartition(".")
    return getattr(import_module(module), name)


def _then_kill(
    original: Callable[..., object], nth: int, signum: signal.Signals
) -> Callable[..., object]:
    """`original`, which sends this process a signal at the end of its n-th call."""
    calls = 0

    def wrapped(*args: object, **kwargs: object) -> object:
        nonlocal calls
        calls += 1
        result = original(*args, **kwargs)
        if calls == nth:
            os.kill(os.getpid(), signum)
        return result

    return wrapped


if __name__ == "__main__":
    raise SystemExit(_main())
