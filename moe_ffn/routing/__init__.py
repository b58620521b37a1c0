"""Routers, which choose the experts of each token and their weights.

Each file has the config and the module of one router; `top_k.py` has two, `top_k` and `sigmoid_top_k`. To add
a router, add a file to this folder and import its config in this `__init__.py`.
"""

from moe_ffn.routing.balanced_assignment import BalancedAssignmentRouterConfig
from moe_ffn.routing.base import (
    LinearRouter,
    LinearRouterConfig,
    LinearTopKConfig,
    MeanKConfig,
    Router,
    RouterConfig,
    routing_of_pairs,
)
from moe_ffn.routing.capacity import CapacityConfig
from moe_ffn.routing.elastic_top_k import ElasticTopKRouterConfig
from moe_ffn.routing.expert_choice import ExpertChoiceRouterConfig
from moe_ffn.routing.expert_threshold import ExpertThresholdRouterConfig
from moe_ffn.routing.forced import ForcedRouterConfig
from moe_ffn.routing.hash import HashRouterConfig
from moe_ffn.routing.neuron_top_k import NeuronTopKRouterConfig
from moe_ffn.routing.noisy_top_k import NoisyTopKRouterConfig
from moe_ffn.routing.product_key import ProductKeyRouterConfig
from moe_ffn.routing.relu import ReLURouterConfig
from moe_ffn.routing.sinkhorn import SinkhornRouterConfig
from moe_ffn.routing.sparse_mixer import SparseMixerRouterConfig
from moe_ffn.routing.top_k import (
    GroupsConfig,
    SigmoidTopKRouterConfig,
    TokenTableConfig,
    TopKRouterConfig,
)
from moe_ffn.routing.top_p import TopPRouterConfig

__all__ = [
    "BalancedAssignmentRouterConfig",
    "CapacityConfig",
    "ElasticTopKRouterConfig",
    "ExpertChoiceRouterConfig",
    "ExpertThresholdRouterConfig",
    "ForcedRouterConfig",
    "GroupsConfig",
    "HashRouterConfig",
    "LinearRouter",
    "LinearRouterConfig",
    "LinearTopKConfig",
    "MeanKConfig",
    "NeuronTopKRouterConfig",
    "NoisyTopKRouterConfig",
    "ProductKeyRouterConfig",
    "ReLURouterConfig",
    "Router",
    "RouterConfig",
    "SigmoidTopKRouterConfig",
    "SinkhornRouterConfig",
    "SparseMixerRouterConfig",
    "TokenTableConfig",
    "TopKRouterConfig",
    "TopPRouterConfig",
    "routing_of_pairs",
]
