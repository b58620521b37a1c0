"""Programs of a clone: train, sweep and compare as in `moe-ffn`, the benchmark, and writers of docs pages."""

# Before a program imports torch.
from moe_ffn.config import environment  # noqa: F401  # pyright: ignore[reportUnusedImport]
