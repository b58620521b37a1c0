"""What a person runs: `python -m experiments.train`, and the rest."""

# Before a program imports torch.
from moe_ffn import environment  # noqa: F401  # pyright: ignore[reportUnusedImport]
