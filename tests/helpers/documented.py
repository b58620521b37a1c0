"""The code that documents show."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


CUSTOM = ("docs/tutorials/custom_ffn.md", "docs/howto/custom_experts.md")


def python_with(text: str, *files: str) -> str:
    """The block of Python in documents that holds `text`, which one alone does."""
    page = "\n".join((ROOT / file).read_text(encoding="utf-8") for file in files or CUSTOM)
    found = re.findall(r"^```python\n(.*?)^```", page, flags=re.DOTALL | re.MULTILINE)
    (block,) = (code for code in found if text in code)
    return block
