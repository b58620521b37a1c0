"""The family of routers: every config by name; torch-free (see `moe_ffn.config`).

To add a router to the package: its config in `token_choice_config.py` (each token goes by itself) or
`balanced_config.py` (tokens are compared with each other), its module in a file of its own.
"""

from moe_ffn.routing.balanced_config import (
    BalancedAssignmentRouterConfig,
    ExpertChoiceRouterConfig,
    SinkhornRouterConfig,
)
from moe_ffn.routing.base_config import FixedKConfig, LinearRouterConfig, RouterConfig
from moe_ffn.routing.token_choice_config import (
    ForcedRouterConfig,
    HashRouterConfig,
    NoisyTopKRouterConfig,
    ReLURouterConfig,
    TopPRouterConfig,
)
from moe_ffn.routing.top_k_config import (
    GroupsConfig,
    SigmoidTopKRouterConfig,
    TopKRouterConfig,
)

__all__ = [
    "BalancedAssignmentRouterConfig",
    "ExpertChoiceRouterConfig",
    "FixedKConfig",
    "ForcedRouterConfig",
    "GroupsConfig",
    "HashRouterConfig",
    "LinearRouterConfig",
    "NoisyTopKRouterConfig",
    "ReLURouterConfig",
    "RouterConfig",
    "SigmoidTopKRouterConfig",
    "SinkhornRouterConfig",
    "TopKRouterConfig",
    "TopPRouterConfig",
]
