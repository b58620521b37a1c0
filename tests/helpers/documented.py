"""The code that documents show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def python_with(text: str, file: str = "docs/tutorials/custom_ffn.md") -> str:
    """The block of Python in a document that holds `text`, which one alone does."""
    page = (ROOT / file).read_text(encoding="utf-8")
    found = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    (block,) = (code for code in found if text in code)
    return block
