"""Routing metrics: pure functions, and torchmetrics classes that accumulate them.

    from moe_ffn.metrics import LoadMetrics, max_violation

The functions need only torch. The classes accumulate over batches and ranks, and need torchmetrics.
"""

from typing import TYPE_CHECKING

from moe_ffn.config import lazy_names
from moe_ffn.metrics.baselines import ngram_loss, unigram_loss
from moe_ffn.metrics.functional import (
    chosen_experts,
    churn,
    coactivation,
    coactivation_counts,
    idle_steps,
    load_cv,
    load_entropy,
    logit_max,
    max_violation,
    nonfinite_tokens,
    rank_max_violation,
    top1_margin,
)

if TYPE_CHECKING:
    from moe_ffn.metrics.modular import (
        CoactivationMetrics,
        LanguageMetrics,
        LoadMetrics,
        PairsOnlyMetrics,
        TokenMetrics,
    )

__all__ = [
    "CoactivationMetrics",
    "LanguageMetrics",
    "LoadMetrics",
    "PairsOnlyMetrics",
    "TokenMetrics",
    "chosen_experts",
    "churn",
    "coactivation",
    "coactivation_counts",
    "idle_steps",
    "load_cv",
    "load_entropy",
    "logit_max",
    "max_violation",
    "ngram_loss",
    "nonfinite_tokens",
    "rank_max_violation",
    "top1_margin",
    "unigram_loss",
]

_CLASSES: dict[str, str] = dict.fromkeys(
    ["CoactivationMetrics", "LanguageMetrics", "PairsOnlyMetrics", "LoadMetrics", "TokenMetrics"],
    "moe_ffn.metrics.modular",
)

__getattr__, __dir__ = lazy_names(
    __name__,
    _CLASSES,
    install="pip install torchmetrics (the functions of moe_ffn.metrics.functional need only torch)",
)
