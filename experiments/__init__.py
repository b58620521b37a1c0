"""Programs for a clone: the main ones of `moe-ffn`, the benchmark, and a writer of a docs page."""

# Its environment variables must be set before a program imports torch.
from moe_ffn.config import environment  # noqa: F401  # pyright: ignore[reportUnusedImport]

# isort: split
from moe_ffn.cli import exit_without_packages

exit_without_packages()
