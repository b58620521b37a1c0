"""How fast the layers and a training step are, beside the dense block and other libraries.

    python -m experiments.benchmark --help

Needs what the layers need (torch, einops, pydantic) and times whichever other library is installed.
"""
