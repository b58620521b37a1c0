"""Load balancing: losses, which are pure functions of a Routing, and rules that update a router's bias."""

from moe_ffn.balancing.bias_rules import (
    BiasRuleConfig,
    GlobalQuantileRuleConfig,
    QuantileRuleConfig,
    SignRuleConfig,
    SparsityRuleConfig,
)
from moe_ffn.balancing.losses import (
    BalancingWeights,
    StepTotals,
    count_step,
    coupling_loss,
    global_load_balancing_loss,
    importance_cv2_loss,
    load_balancing_loss,
    load_cv2_loss,
    pooled_load_balancing_loss,
    proxy_tokens,
    relu_sparsity_loss,
    router_entropy_loss,
    router_z_loss,
    sequence_load_balancing_loss,
)
from moe_ffn.balancing.sums import pairs_per_expert

__all__ = [
    "BalancingWeights",
    "BiasRuleConfig",
    "GlobalQuantileRuleConfig",
    "QuantileRuleConfig",
    "SignRuleConfig",
    "SparsityRuleConfig",
    "StepTotals",
    "count_step",
    "coupling_loss",
    "global_load_balancing_loss",
    "importance_cv2_loss",
    "load_balancing_loss",
    "load_cv2_loss",
    "pairs_per_expert",
    "pooled_load_balancing_loss",
    "proxy_tokens",
    "relu_sparsity_loss",
    "router_entropy_loss",
    "router_z_loss",
    "sequence_load_balancing_loss",
]
