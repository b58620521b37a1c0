"""The beginning of a program for `python -c` in which plotly cannot be imported at all."""

from __future__ import annotations

WITHOUT_PLOTLY = """
import sys
from importlib.abc import MetaPathFinder


class Nowhere(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "plotly":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


sys.meta_path.insert(0, Nowhere())
from moe_ffn.cli.exit import exit_on_bad_input
"""
