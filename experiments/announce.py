"""A line before the imports that take seconds, and what they need; needs neither torch nor YAML."""

from __future__ import annotations

import os
import sys
import tempfile

from experiments.ranks import is_first_rank
from moe_ffn.errors import ConfigError


def announce_import(*packages: str) -> None:
    """`importing torch and lightning`, on stderr, of those not imported yet; of several ranks, by the first.

    Call it once nothing but the work itself is left: what answers a mistake, or `--help`, says nothing else.

    Raises:
        ConfigError: torch cannot be imported for want of a folder.
    """
    _check_folders()
    awaited = [name for name in packages if name not in sys.modules]
    if awaited and is_first_rank():
        print(f"importing {' and '.join(awaited)} ...", file=sys.stderr, flush=True)


def _check_folders() -> None:
    try:
        os.getcwd()  # noqa: PTH109 - Path.cwd() is the same
    except FileNotFoundError as error:
        raise ConfigError(
            "the current folder was removed, and torch cannot be imported in it; cd to another"
        ) from error
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(
            "TMPDIR: no folder for temporary files can be written, and torch cannot be imported without; "
            "make room in /tmp, or set TMPDIR to another folder"
        ) from error
