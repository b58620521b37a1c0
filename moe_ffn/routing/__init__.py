"""Routers, which choose the experts of each token and their weights.

Each file has the config and the module of one router; `top_k.py` has two, `top_k` and `sigmoid_top_k`. To add
a router, add a file to this folder and import its config in this `__init__.py`.
"""

from moe_ffn.routing.balanced_assignment import (
    BalancedAssignmentRouterConfig as BalancedAssignmentRouterConfig,
)
from moe_ffn.routing.base import LinearRouter as LinearRouter
from moe_ffn.routing.base import LinearRouterConfig as LinearRouterConfig
from moe_ffn.routing.base import LinearTopKConfig as LinearTopKConfig
from moe_ffn.routing.base import MeanKConfig as MeanKConfig
from moe_ffn.routing.base import Router as Router
from moe_ffn.routing.base import RouterConfig as RouterConfig
from moe_ffn.routing.base import routing_of_pairs as routing_of_pairs
from moe_ffn.routing.elastic_top_k import ElasticTopKRouterConfig as ElasticTopKRouterConfig
from moe_ffn.routing.expert_choice import ExpertChoiceRouterConfig as ExpertChoiceRouterConfig
from moe_ffn.routing.expert_threshold import (
    ExpertThresholdRouterConfig as ExpertThresholdRouterConfig,
)
from moe_ffn.routing.forced import ForcedRouterConfig as ForcedRouterConfig
from moe_ffn.routing.hash import HashRouterConfig as HashRouterConfig
from moe_ffn.routing.neuron_top_k import NeuronTopKRouterConfig as NeuronTopKRouterConfig
from moe_ffn.routing.noisy_top_k import NoisyTopKRouterConfig as NoisyTopKRouterConfig
from moe_ffn.routing.product_key import ProductKeyRouterConfig as ProductKeyRouterConfig
from moe_ffn.routing.relu import ReLURouterConfig as ReLURouterConfig
from moe_ffn.routing.sinkhorn import SinkhornRouterConfig as SinkhornRouterConfig
from moe_ffn.routing.sparse_mixer import SparseMixerRouterConfig as SparseMixerRouterConfig
from moe_ffn.routing.top_k import GroupsConfig as GroupsConfig
from moe_ffn.routing.top_k import SigmoidTopKRouterConfig as SigmoidTopKRouterConfig
from moe_ffn.routing.top_k import TopKRouterConfig as TopKRouterConfig
from moe_ffn.routing.top_p import TopPRouterConfig as TopPRouterConfig
