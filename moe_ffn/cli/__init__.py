"""The programs of the console command `moe-ffn`, also run as `python -m moe_ffn.cli`.

They need more packages than the layers. If one is missing, importing this package names it and exits.
"""

import importlib.util
import sys

from moe_ffn.config.errors import install

_NEEDED = ("lightning", "numpy", "plotly", "rich", "tokenizers", "torchmetrics", "yaml")

_missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
if _missing:
    print(
        f"error: the programs need {', '.join(_missing)}; install with: {install('train')}",
        file=sys.stderr,
    )
    raise SystemExit(2)
