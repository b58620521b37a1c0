"""The programs: `moe-ffn train`, or `python -m experiments.train` from a clone, and the others.

Importing this says what to install, before an import of it fails: programs need more than the layers do.
"""

import importlib.util
import sys

_NEEDED = ("lightning", "numpy", "rich", "tokenizers", "torchmetrics", "yaml")

_missing = [name for name in _NEEDED if importlib.util.find_spec(name) is None]
if _missing:
    print(
        f"error: experiments needs {', '.join(_missing)}; install with: pip install '.[train]'",
        file=sys.stderr,
    )
    raise SystemExit(2)
