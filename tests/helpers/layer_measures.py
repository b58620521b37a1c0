"""Measures that a run logs for each sparse layer, some of them only in some runs."""

MEASURES = (
    "max_violation",
    "load_cv",
    "dead_experts",
    "dropped_fraction",
    "capacity_used",
    "experts_per_token",
    "nonfinite_tokens",
    "entropy",
    "entropy_of_mean",
    "top1_margin",
    "logit_max",
    "router_z",
    "load_balance",
    "coactivation_max",
    "sequence_max_violation",
    "shared_share",
    "rank_max_violation",
    "bias_spread",
    "churn",
)
