"""The configs of the routers that balance by comparing tokens with each other; torch-free.

What one token gets then depends on the others, later ones among them: none of these is causal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from moe_ffn.config import MOST
from moe_ffn.routing.base_config import FixedKConfig, LinearRouterConfig

if TYPE_CHECKING:
    from moe_ffn.routing.base import Router


class ExpertChoiceRouterConfig(FixedKConfig, LinearRouterConfig, frozen=True):
    """Expert choice: each expert takes its most probable tokens, k * tokens / num_experts of them.

    Zhou et al. 2022 (arXiv:2202.09368). Perfectly balanced; a token may get many experts or none.
    """

    type: Literal["expert_choice"] = "expert_choice"
    k: float = Field(default=2.0, gt=0)
    """Experts per token, on average; the paper's capacity factor."""
    among: Literal["sequence", "batch"] = "sequence"
    """The tokens that an expert chooses from: those of one sequence, so that a sequence does not
    depend on its neighbours, or of the whole batch, as in the paper."""
    score: Literal["softmax", "sigmoid"] = "softmax"
    """How logits become weights: against the other experts, or each by itself."""

    @property
    def not_causal_because(self) -> str | None:
        return "router.type 'expert_choice' ranks tokens against later ones; use 'top_k'"

    def check_num_experts(self, num_experts: int) -> None:
        super().check_num_experts(num_experts)
        if num_experts == 1 and self.score == "softmax":
            raise ValueError(
                "router.score (softmax) with a single expert makes every weight a constant 1, so the "
                "router would never learn; set router.score: sigmoid"
            )

    def build(self, d_model: int, num_experts: int) -> Router:
        from moe_ffn.routing.expert_choice import ExpertChoiceRouter

        return ExpertChoiceRouter(self, d_model, num_experts)


class SinkhornRouterConfig(FixedKConfig, LinearRouterConfig, frozen=True):
    """Sinkhorn: in training, top-k of the scores after they were made balanced by Sinkhorn's rule.

    Clark et al. 2022, S-BASE (arXiv:2202.01169), as Megatron-LM has it. Weights are of the plain
    scores, sigmoid for k = 1 and softmax otherwise; evaluation is plain top-k.
    """

    type: Literal["sinkhorn"] = "sinkhorn"
    k: int = Field(default=1, ge=1, le=MOST)
    """Experts per token."""
    tolerance: float = Field(default=1e-4, gt=0)
    """Stop when no column's factor changes by more than this share of itself."""
    max_iterations: int = Field(default=100, ge=1, le=MOST)
    """Stop after this many rounds at the latest; logits in the hundreds are not balanced by then."""

    @property
    def not_causal_because(self) -> str | None:
        return "router.type 'sinkhorn' balances tokens against later ones; use 'top_k'"

    def build(self, d_model: int, num_experts: int) -> Router:
        from moe_ffn.routing.sinkhorn import SinkhornRouter

        return SinkhornRouter(self, d_model, num_experts)


class BalancedAssignmentRouterConfig(LinearRouterConfig, frozen=True):
    """BASE: in training, the assignment of highest total score in which all experts have equally many.

    Lewis et al. 2021, BASE layers (arXiv:2103.16716): one expert per token, weighted by the sigmoid
    of its score; evaluation takes the highest score.
    """

    type: Literal["balanced_assignment"] = "balanced_assignment"

    @property
    def not_causal_because(self) -> str | None:
        return "router.type 'balanced_assignment' balances tokens against later ones; use 'top_k'"

    def experts_per_token(self, num_experts: int) -> float:
        return 1

    def build(self, d_model: int, num_experts: int) -> Router:
        from moe_ffn.routing.balanced_assignment import BalancedAssignmentRouter

        return BalancedAssignmentRouter(self, d_model, num_experts)
