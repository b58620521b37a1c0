"""A line before the imports that take seconds; needs neither torch nor YAML."""

from __future__ import annotations

import sys

from experiments.ranks import is_first_rank


def announce_import(*packages: str) -> None:
    """`importing torch and lightning`, on stderr, of those not imported yet; of several ranks, by the first.

    Call it once nothing but the work itself is left: what answers a mistake, or `--help`, says nothing else.
    """
    awaited = [name for name in packages if name not in sys.modules]
    if awaited and is_first_rank():
        print(f"importing {' and '.join(awaited)} ...", file=sys.stderr, flush=True)
