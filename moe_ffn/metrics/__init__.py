"""What is measured of a routing: pure functions, and thin torchmetrics over them.

    from moe_ffn.metrics import LoadMetrics, max_violation

The functions need torch alone; the classes, which add up batches and ranks, need torchmetrics. As in
`moe_ffn`, each name is imported when it is first asked for.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from moe_ffn.metrics.functional import (
        chosen_experts,
        churn,
        coactivation,
        coactivation_counts,
        idle_steps,
        load_cv,
        logit_max,
        max_violation,
        nonfinite_tokens,
        rank_max_violation,
        top1_margin,
    )
    from moe_ffn.metrics.language import (
        LanguageMetrics,
    )
    from moe_ffn.metrics.routing import (
        CoactivationMetrics,
        LoadMetrics,
        TokenMetrics,
    )

_HOMES = {
    "functional": (
        "chosen_experts",
        "churn",
        "coactivation",
        "coactivation_counts",
        "idle_steps",
        "load_cv",
        "logit_max",
        "max_violation",
        "nonfinite_tokens",
        "rank_max_violation",
        "top1_margin",
    ),
    "language": ("LanguageMetrics",),
    "routing": (
        "CoactivationMetrics",
        "LoadMetrics",
        "TokenMetrics",
    ),
}
"""Where each public name lives; the same lines as the imports above, which only type checkers run."""

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "CoactivationMetrics",
    "LanguageMetrics",
    "LoadMetrics",
    "TokenMetrics",
    "chosen_experts",
    "churn",
    "coactivation",
    "coactivation_counts",
    "idle_steps",
    "load_cv",
    "logit_max",
    "max_violation",
    "nonfinite_tokens",
    "rank_max_violation",
    "top1_margin",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'moe_ffn.metrics' has no attribute '{name}'")
    try:
        return getattr(import_module(f"moe_ffn.metrics.{_HOME_OF[name]}"), name)
    except ModuleNotFoundError as error:
        if error.name != "torchmetrics":
            raise
        raise ModuleNotFoundError(
            f"moe_ffn.metrics.{name} needs torchmetrics; install with: pip install '.[train]' "
            "(the functions of moe_ffn.metrics.functional need torch alone)",
            name=error.name,
        ) from error


def __dir__() -> list[str]:
    return __all__
