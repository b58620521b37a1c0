"""Formats of transformers, and files of llama.cpp: options, weights and blocks in ours, and back.

Nothing here needs transformers; what runs with its live models is in `moe_ffn.interop`.

families.py      models as a whole: one entry each
options.py       options of a `config.json` in ours
layouts.py       our weights as slices of theirs
rewrites.py      our blocks in the form that an architecture needs: norms merged, biases added
from_transformers.py, to_transformers.py
                 model folders of transformers, read and written
to_gguf.py       files of llama.cpp
block_table.py   sparse blocks alone: one entry each, in the language of block_parts.py
blocks.py        a live block, converted by its entry
"""

from typing import TYPE_CHECKING

from moe_ffn.config import lazy_names
from moe_ffn.config.errors import install

if TYPE_CHECKING:
    from moe_ffn.hf.blocks import block_config, convert_block
    from moe_ffn.hf.from_transformers import load_ffn, load_transformers
    from moe_ffn.hf.to_gguf import export_gguf
    from moe_ffn.hf.to_transformers import export_transformers

_LAZY = {
    "block_config": "moe_ffn.hf.blocks",
    "convert_block": "moe_ffn.hf.blocks",
    "export_gguf": "moe_ffn.hf.to_gguf",
    "export_transformers": "moe_ffn.hf.to_transformers",
    "load_ffn": "moe_ffn.hf.from_transformers",
    "load_transformers": "moe_ffn.hf.from_transformers",
}
"""Names that are imported on first use, because they need optional packages."""

__all__ = [
    "block_config",
    "convert_block",
    "export_gguf",
    "export_transformers",
    "load_ffn",
    "load_transformers",
]

__getattr__, __dir__ = lazy_names(__name__, _LAZY, install=install("train"))
