"""Model folders, and models that are made from trained models.

pretrained.py        model folders of this project: write, check and read
open_model.py        a trained model, opened from a model folder or a run
init_from.py         a run that starts from the weights of a trained model
initialiser.py       a model made from trained models without training: upcycle.py (upcycle, mix), carve.py,
                     prune.py (prune, merge); compared in `docs/howto/initialise.md`
"""

from moe_ffn.weights.carve import CarveConfig, carve
from moe_ffn.weights.initialiser import InitialiserConfig
from moe_ffn.weights.prune import MergeConfig, PruneConfig, merge_experts, prune_experts
from moe_ffn.weights.upcycle import MixConfig, UpcycleConfig, upcycle

__all__ = [
    "CarveConfig",
    "InitialiserConfig",
    "MergeConfig",
    "MixConfig",
    "PruneConfig",
    "UpcycleConfig",
    "carve",
    "merge_experts",
    "prune_experts",
    "upcycle",
]
