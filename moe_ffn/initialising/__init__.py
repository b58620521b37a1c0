"""Models made of trained ones without training: dense into sparse, sparse into smaller. One file per method.

`docs/initialising.md` compares them; `moe-ffn initialise` writes what they make as a model folder, from which
a run starts by `init_from`.
"""

from moe_ffn.initialising.base import InitialiserConfig as InitialiserConfig
from moe_ffn.initialising.carve import CarveConfig as CarveConfig
from moe_ffn.initialising.carve import carve as carve
from moe_ffn.initialising.merge import MergeConfig as MergeConfig
from moe_ffn.initialising.merge import merge_experts as merge_experts
from moe_ffn.initialising.mix import MixConfig as MixConfig
from moe_ffn.initialising.prune import PruneConfig as PruneConfig
from moe_ffn.initialising.prune import prune_experts as prune_experts
from moe_ffn.initialising.upcycle import UpcycleConfig as UpcycleConfig
from moe_ffn.initialising.upcycle import upcycle as upcycle
