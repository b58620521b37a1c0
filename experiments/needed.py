"""Says what to install, before an import of it fails: most programs need more than the layers do.

`experiments.command_line` imports this first; a program that does without it, such as
`experiments.benchmark`, needs the layers' packages alone.
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
