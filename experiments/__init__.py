"""What a person runs: `python -m experiments.train`, and the rest.

These programs need more than the layers do, so that is said here once, before an import fails.
"""

import importlib.util
import sys

NEEDED = ("lightning", "numpy", "rich", "tokenizers", "torchmetrics", "yaml")

missing = [name for name in NEEDED if importlib.util.find_spec(name) is None]
if missing:
    print(
        f"error: experiments needs {', '.join(missing)}; install with: pip install '.[train]'",
        file=sys.stderr,
    )
    raise SystemExit(2)
