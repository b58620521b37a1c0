"""Model folders, and models that are made from trained models.

pretrained.py        model folders of this project: write, check and read
init_from.py         a run that starts from the weights of a folder or a run
to_transformers.py, from_transformers.py, families.py, layouts.py, options.py, rewrites.py
                     model folders of transformers
to_gguf.py           files of llama.cpp
initialiser.py       a model made from trained models without training: upcycle.py (upcycle, mix), carve.py,
                     prune.py (prune, merge); compared in `docs/howto/initialise.md`
"""

from typing import TYPE_CHECKING

from moe_ffn.config import lazy_names
from moe_ffn.config.errors import install
from moe_ffn.weights.carve import CarveConfig, carve
from moe_ffn.weights.initialiser import InitialiserConfig
from moe_ffn.weights.prune import MergeConfig, PruneConfig, merge_experts, prune_experts
from moe_ffn.weights.upcycle import MixConfig, UpcycleConfig, upcycle

if TYPE_CHECKING:
    from moe_ffn.weights.from_transformers import load_ffn, load_transformers
    from moe_ffn.weights.to_gguf import export_gguf
    from moe_ffn.weights.to_transformers import export_transformers

_LAZY = {
    "export_gguf": "moe_ffn.weights.to_gguf",
    "export_transformers": "moe_ffn.weights.to_transformers",
    "load_ffn": "moe_ffn.weights.from_transformers",
    "load_transformers": "moe_ffn.weights.from_transformers",
}
"""Names that are imported on first use, because they need optional packages."""

__all__ = [
    "CarveConfig",
    "InitialiserConfig",
    "MergeConfig",
    "MixConfig",
    "PruneConfig",
    "UpcycleConfig",
    "carve",
    "export_gguf",
    "export_transformers",
    "load_ffn",
    "load_transformers",
    "merge_experts",
    "prune_experts",
    "upcycle",
]

__getattr__, __dir__ = lazy_names(__name__, _LAZY, install=install("train"))
