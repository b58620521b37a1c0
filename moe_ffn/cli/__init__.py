"""The programs of the console command `moe-ffn`, also run as `python -m moe_ffn.cli`.

They need more packages than the layers.
"""

import sys

from moe_ffn.config.environment import require_packages


def exit_without_packages() -> None:
    """Exit with code 2 if a package of the programs is missing."""
    try:
        require_packages()
    except ModuleNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
