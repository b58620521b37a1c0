"""Routing metrics: pure functions, and torchmetrics classes that accumulate them.

    from moe_ffn.metrics import LoadMetrics, max_violation

The functions need only torch. The classes accumulate over batches and ranks, and need torchmetrics.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

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
    unigram_loss,
)

if TYPE_CHECKING:
    from moe_ffn.metrics.modular import (
        CoactivationMetrics,
        LanguageMetrics,
        ListMetrics,
        LoadMetrics,
        TokenMetrics,
    )

__all__ = [
    "CoactivationMetrics",
    "LanguageMetrics",
    "ListMetrics",
    "LoadMetrics",
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
    "nonfinite_tokens",
    "rank_max_violation",
    "top1_margin",
    "unigram_loss",
]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'moe_ffn.metrics' has no attribute '{name}'")
    try:
        return getattr(import_module("moe_ffn.metrics.modular"), name)
    except ModuleNotFoundError as error:
        if error.name != "torchmetrics":
            raise
        raise ModuleNotFoundError(
            f"moe_ffn.metrics.{name} needs torchmetrics: pip install torchmetrics "
            "(the functions of moe_ffn.metrics.functional need only torch)",
            name=error.name,
        ) from error


def __dir__() -> list[str]:
    return __all__
