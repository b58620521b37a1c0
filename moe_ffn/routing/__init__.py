"""WHO: which token goes to which expert, with what weight. One file per router, config and module together.

A new router is one file in this folder, and one line here.
"""

from moe_ffn.routing.balanced_assignment import BalancedAssignmentRouterConfig
from moe_ffn.routing.base import (
    FixedKConfig,
    LinearRouter,
    LinearRouterConfig,
    Router,
    RouterConfig,
    routing_of_pairs,
)
from moe_ffn.routing.expert_choice import ExpertChoiceRouterConfig
from moe_ffn.routing.forced import ForcedRouterConfig
from moe_ffn.routing.hash import HashRouterConfig
from moe_ffn.routing.noisy_top_k import NoisyTopKRouterConfig
from moe_ffn.routing.relu import ReLURouterConfig
from moe_ffn.routing.sinkhorn import SinkhornRouterConfig
from moe_ffn.routing.top_k import GroupsConfig, SigmoidTopKRouterConfig, TopKRouterConfig
from moe_ffn.routing.top_p import TopPRouterConfig

__all__ = [
    "BalancedAssignmentRouterConfig",
    "ExpertChoiceRouterConfig",
    "FixedKConfig",
    "ForcedRouterConfig",
    "GroupsConfig",
    "HashRouterConfig",
    "LinearRouter",
    "LinearRouterConfig",
    "NoisyTopKRouterConfig",
    "ReLURouterConfig",
    "Router",
    "RouterConfig",
    "SigmoidTopKRouterConfig",
    "SinkhornRouterConfig",
    "TopKRouterConfig",
    "TopPRouterConfig",
    "routing_of_pairs",
]
