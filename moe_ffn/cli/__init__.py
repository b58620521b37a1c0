"""The programs of the console command `moe-ffn`, also run as `python -m moe_ffn.cli`.

They need more packages than the layers.
"""

import importlib.util
import sys

from moe_ffn.config.errors import install

_NEEDED = ("lightning", "numpy", "plotly", "rich", "tokenizers", "torchmetrics", "yaml")


def require_packages() -> None:
    """Raise ModuleNotFoundError if a package of the programs is missing."""
    missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
    if missing:
        raise ModuleNotFoundError(
            f"the programs need {', '.join(missing)}; install with: {install('train')}"
        )


def exit_without_packages() -> None:
    """Exit with code 2 if a package of the programs is missing."""
    try:
        require_packages()
    except ModuleNotFoundError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(2) from None
