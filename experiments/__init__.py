"""The programs, from a clone: `python -m experiments.train` and the others; the benchmark."""

# Before a program imports torch.
from moe_ffn.config import environment  # noqa: F401  # pyright: ignore[reportUnusedImport]
