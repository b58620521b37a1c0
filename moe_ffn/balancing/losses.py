"""Balancing losses: pure functions of a Routing, the table of all losses, and the config of their weights.

The loss of expert-router coupling is a function of weights, not of a Routing, so it is not in the table.

To add a loss, add its function, its entry in `BALANCING_LOSSES` and, unless a rule sets its weight, its
weight in `BalancingWeights`. The objective, the metric rows and the report read the table.

T tokens, E experts, N (token, expert) pairs, B sequences, D model width, F hidden width
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from einops import reduce
from pydantic import Field
from torch import Tensor

from moe_ffn.balancing.pairs_only import (
    entropy_from_pairs,
    importance_from_pairs,
    load_balance_from_pairs,
    logsumexp_from_pairs,
)
from moe_ffn.balancing.sums import (
    Routers,
    check_routing,
    cv_squared,
    load_times_scores,
    mean_over_tokens,
    normalized_scores,
    pairs_per_expert,
    pairs_per_sequence,
    real_only,
    sum_of_scores,
    takes_routing,
    token_entropy,
)
from moe_ffn.config.base import Config
from moe_ffn.outputs import NoisyRouting, PairsOnlyRouting, Routing, SparsityTargetRouting


class BalancingWeights(Config, frozen=True):
    """The weights of the losses in `BALANCING_LOSSES`, by name, except those that a rule sets."""

    load_balance: float = Field(default=0.01, ge=0)
    """Weight of the Switch load-balancing loss of each batch and rank, which is 1 at balance."""
    load_balance_global: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss over all batches and ranks of an optimizer step. With gradient
    accumulation it costs an additional forward pass of each batch."""
    load_balance_sequence: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss of each sequence, averaged over sequences (DeepSeek-V3)."""
    load_balance_pooled: float = Field(default=0.0, ge=0)
    """Weight of the load-balancing loss over the tokens of all layers, as in Hugging Face."""
    importance_cv2: float = Field(default=0.0, ge=0)
    """Weight of the squared coefficient of variation of the experts' summed weights (Shazeer et al. 2017)."""
    load_cv2: float = Field(default=0.0, ge=0)
    """Weight of the squared coefficient of variation of the smooth load (`noisy_top_k` only)."""
    router_z: float = Field(default=0.001, ge=0)
    """Weight of the router z-loss, which keeps logits small (ST-MoE)."""
    router_entropy: float = Field(default=0.0, ge=0)
    """Weight of the mean entropy of a token's scores; without it, top-p routers use more and more experts."""


@takes_routing
def load_balancing_loss(routing: Routing) -> Tensor:
    """Return E * sum_i f_i P_i (Fedus et al. 2021, Switch Transformer, equation 4).

    f_i is expert i's share of the pairs, before dropping and without padding; P_i is the mean normalised
    score of expert i. Only P carries gradient. The loss of a balanced router is 1 for every k and E; in
    Switch's reference code, which counts tokens instead of pairs, it is k.

    Returns:
        Scalar; 0 if no token is real.
    """
    if isinstance(routing, PairsOnlyRouting):
        return load_balance_from_pairs(routing)
    routing = routing.choices()
    scores_E = sum_of_scores(routing, "load_balance")
    return load_times_scores(pairs_per_expert(routing), scores_E, routing.num_real_tokens)


def pooled_load_balancing_loss(layers: Sequence[Routing]) -> Tensor:
    """Return `load_balancing_loss` over the tokens of all layers, as in Hugging Face.

    Use it only to compare with models trained this way: two layers that collapse onto opposite halves of
    their experts look balanced. Hugging Face's value is k times larger.

    Raises:
        ValueError: there is no layer, or the layers differ in their number of experts.
    """
    for routing in layers:
        check_routing(routing, "pooled_load_balancing_loss")
    if not layers:
        raise ValueError("load_balance_pooled needs the routing of at least one layer, got none")
    layers = [routing.choices() for routing in layers]
    if len({routing.num_experts for routing in layers}) > 1:
        sizes = ", ".join(str(routing.num_experts) for routing in layers)
        raise ValueError(
            f"load_balance_pooled needs equally many experts in every layer, got {sizes}; "
            "use load_balance"
        )
    load_LE = torch.stack([pairs_per_expert(routing) for routing in layers])
    scores_LE = torch.stack([sum_of_scores(routing, "load_balance_pooled") for routing in layers])
    num_tokens = sum(routing.num_real_tokens for routing in layers)
    return load_times_scores(load_LE.sum(0), scores_LE.sum(0), num_tokens)


@takes_routing
def sequence_load_balancing_loss(routing: Routing) -> Tensor:
    """Return the mean of the sequences' load-balancing losses (DeepSeek-V3, section 2.1.2).

    It asks for balance within every sequence. Sequences with only padding do not count.
    """
    if isinstance(routing, PairsOnlyRouting):
        return load_balance_from_pairs(routing, by_sequence=True)
    routing, length = routing.choices(), max(routing.sequence_length, 1)
    pairs_BE = pairs_per_sequence(routing)
    real_TE = real_only(normalized_scores(routing, "load_balance_sequence"), routing)
    scores_BE = reduce(real_TE, "(b s) e -> b e", "sum", s=length)
    num_tokens_B = torch.full((len(pairs_BE),), length, device=pairs_BE.device)
    if routing.mask_T is not None:
        num_tokens_B = reduce(routing.mask_T.long(), "(b s) -> b", "sum", s=length)
    losses_B = load_times_scores(pairs_BE, scores_BE, num_tokens_B.unsqueeze(-1))
    return losses_B.sum() / (num_tokens_B > 0).sum().clamp(min=1)


@takes_routing
def global_load_balancing_loss(routing: Routing, pairs_E: Tensor, num_tokens: Tensor) -> Tensor:
    """Return one batch's part of the load-balancing loss of a whole optimizer step.

    The parts of all batches and ranks, and their gradients, add up to `load_balancing_loss` over all tokens
    of the step (Qiu et al. 2025, "Demons in the Detail", arXiv:2501.11873).

    Args:
        routing: routing of one batch on one rank.
        pairs_E: `pairs_per_expert`, summed over the batches and ranks of the step.
        num_tokens: number of real tokens, summed over the batches and ranks of the step.
    """
    scores_E = sum_of_scores(routing.choices(), "load_balance_global")
    return load_times_scores(pairs_E[: len(scores_E)], scores_E, num_tokens)


@takes_routing
def importance_cv2_loss(routing: Routing) -> Tensor:
    """Return CV^2 of the experts' importance, the sum of their weights (Shazeer et al. 2017, equation 7).

    It is 0 at balance, and includes the weights of dropped pairs.
    """
    if isinstance(routing, PairsOnlyRouting):
        mean, variance = importance_from_pairs(routing)
        return variance / mean.square().clamp(min=torch.finfo(mean.dtype).tiny)
    routing = routing.choices()
    weights_N = torch.where(routing.active_N, routing.weights_N, 0)
    importance_E = weights_N.new_zeros(routing.num_experts)
    return cv_squared(importance_E.index_add(0, routing.expert_ids_N, weights_N))


@takes_routing
def load_cv2_loss(routing: Routing) -> Tensor:
    """Return CV^2 of the experts' smooth load, over the router's noise (Shazeer et al. 2017, equation 11).

    It is 0 at balance.

    Raises:
        ValueError: the routing has no noise: it is from another router or from evaluation.
    """
    if not isinstance(routing, NoisyRouting):
        raise ValueError(
            "load_cv2 needs a NoisyRouting, which router.type 'noisy_top_k' returns in training; "
            "use load_balance with other routers"
        )
    return cv_squared(real_only(routing.selection_probs_TE, routing).sum(dim=0))


@takes_routing
def router_z_loss(routing: Routing) -> Tensor:
    """Return mean_t logsumexp(logits_t)^2 (Zoph et al. 2022, ST-MoE, equation 5), which keeps logits small.

    For a `PairsOnlyRouting` the logsumexp is over the logits of the listed pairs.
    """
    if isinstance(routing, PairsOnlyRouting):
        return mean_over_tokens(logsumexp_from_pairs(routing).square(), routing)
    logits_TE = routing.require("logits_TE", "router_z")
    return mean_over_tokens(logits_TE.logsumexp(dim=-1).square(), routing)


@takes_routing
def router_entropy_loss(routing: Routing) -> Tensor:
    """Return the mean entropy of a token's normalised scores, in nats, between 0 and log E.

    Without it, top-p routing uses more and more experts (Huang et al. 2024, arXiv:2403.07652, equation 6).
    """
    if isinstance(routing, PairsOnlyRouting):
        return entropy_from_pairs(routing)
    scores_TE = normalized_scores(routing, "router_entropy")
    return mean_over_tokens(token_entropy(scores_TE), routing)


def coupling_loss(proxies_ED: Tensor, gate_EFD: Tensor, alpha: float) -> Tensor:
    """Return 1 / E^2 * sum over i, j != i of relu(M_ij - alpha M_ii) + relu(M_ji - alpha M_ii).

    M_ij = |gate_j proxy_i| is the response of expert j to expert i's proxy token (Lv et al. 2025,
    "Coupling Experts and Routers", arXiv:2512.23447, equation 3). It is 0 if each expert responds most to its
    own proxy, and each proxy most excites its own expert.

    Args:
        proxies_ED: proxy token of each expert; see `proxy_tokens`.
        gate_EFD: first matrix of each expert; the gate of gated experts.
        alpha: fraction of M_ii that other responses may reach.
    """
    norms_EE = torch.linalg.vector_norm(torch.einsum("id,jfd->ijf", proxies_ED, gate_EFD), dim=-1)
    own_E = alpha * norms_EE.diagonal()
    excess_EE = (norms_EE - own_E.unsqueeze(1)).relu() + (norms_EE - own_E.unsqueeze(0)).relu()
    return excess_EE.masked_fill(_is_diagonal(excess_EE), 0).mean()


def proxy_tokens(rows_ED: Tensor, generator: torch.Generator | None = None) -> Tensor:
    """Return each row of a router times noise from U(1 - eps_i, 1 + eps_i) (arXiv:2512.23447, section 3.2).

    eps_i = min_j |R_i - R_j| / (2 |R_i|) keeps a proxy token closer to its own row than to any other. The
    noise has no gradient, the rows have one.
    """
    with torch.no_grad():
        distances_EE = torch.cdist(rows_ED, rows_ED)
        nearest_E = distances_EE.masked_fill(_is_diagonal(distances_EE), torch.inf).amin(dim=-1)
        eps_E = nearest_E / (2 * torch.linalg.vector_norm(rows_ED, dim=-1))
        # A row of zeros stays zero; a single expert has no neighbour.
        eps_E1 = eps_E.nan_to_num(0, posinf=0).unsqueeze(-1)
        uniform_ED = torch.rand(
            rows_ED.shape, generator=generator, dtype=rows_ED.dtype, device=rows_ED.device
        )
        noise_ED = 1 + eps_E1 * (2 * uniform_ED - 1)
    return rows_ED * noise_ED


def _is_diagonal(values_EE: Tensor) -> Tensor:
    return torch.eye(len(values_EE), dtype=torch.bool, device=values_EE.device)


@takes_routing
def relu_sparsity_loss(routing: Routing) -> Tensor:
    """Return E / (k T) * sum_i f_i sum_t score_ti, f_i = pairs of i / T: ReMoE's load-balancing L1 loss.

    Wang et al. 2024 (arXiv:2412.14711), equation 10: an L1 norm with larger factors for experts with more
    tokens. k is `routing.target_k`. `sparsity_weight_after` updates the weight of the loss.

    Raises:
        ValueError: the routing has no target number of experts per token.
    """
    if not isinstance(routing, SparsityTargetRouting):
        raise ValueError(
            "relu_sparsity needs a SparsityTargetRouting, which router.type 'relu' returns"
        )
    scores_TE = routing.require("scores_TE", "relu_sparsity")
    pairs_E = pairs_per_expert(routing).to(scores_TE.dtype)
    share_E = pairs_E / routing.num_real_tokens.clamp(min=1) / routing.target_k
    scores_E = mean_over_tokens(scores_TE, routing)
    return routing.num_experts * (share_E * scores_E).sum()


# -- the table


@dataclass(frozen=True)
class StepTotals:
    """Counts over all batches and ranks of one optimizer step."""

    pairs_E: dict[str, Tensor]
    """Real pairs per expert of each sparse layer."""

    num_tokens: dict[str, Tensor]
    """Real tokens of each sparse layer."""

    num_parts: int
    """Batches times ranks. Lightning averages over these, so each loss is multiplied by this number."""


def count_step(
    batches: Iterable[Mapping[str, Routing]],
    reduce: Callable[[Tensor], Tensor] = lambda value: value,
    num_ranks: int = 1,
) -> StepTotals:
    """Return the totals of a step.

    Args:
        batches: routings by layer, for each batch on this rank.
        reduce: function that sums a tensor over the ranks.
        num_ranks: number of ranks.
    """
    pairs: dict[str, Tensor] = {}
    tokens: dict[str, Tensor] = {}
    num_batches = 0
    for routings in batches:
        num_batches += 1
        for layer, routing in routings.items():
            pairs[layer] = pairs_per_expert(routing) + pairs.get(layer, 0)
            tokens[layer] = routing.num_real_tokens + tokens.get(layer, 0)
    if pairs and num_ranks > 1:  # one exchange for all layers
        sizes = [len(pairs_E) for pairs_E in pairs.values()]
        flat = reduce(torch.cat([*pairs.values(), torch.stack(list(tokens.values()))]))
        *summed, summed_tokens = flat.split([*sizes, len(tokens)])
        pairs = dict(zip(pairs, summed, strict=True))
        tokens = dict(zip(tokens, summed_tokens.unbind(), strict=True))
    return StepTotals(pairs, tokens, num_batches * num_ranks)


def _reason_without_noise(routers: Routers) -> str | None:
    for layer, router, _ in routers:
        if not router.has_selection_probs:
            return (
                f"counts over a router's noise, but the router of layer {layer} is '{router.type}'; use "
                "router.type 'noisy_top_k' or objective.load_balance"
            )
    return None


def _reason_without_scores(routers: Routers) -> str | None:
    for layer, router, num_experts in routers:
        if router.is_pairs_only:
            return (
                f"needs a score for each expert, but the router '{router.type}' of layer {layer} scores only "
                f"the chosen ones of its {num_experts} experts; use objective.load_balance"
            )
    return None


def _reason_not_poolable(routers: Routers) -> str | None:
    if reason := _reason_without_scores(routers):
        return reason
    sizes = sorted({n - getattr(router, "num_always", 0) for _, router, n in routers})
    if len(sizes) < 2:
        return None
    return (
        f"needs equally many experts in every layer, got {', '.join(map(str, sizes))}; use "
        "objective.load_balance"
    )


@dataclass(frozen=True)
class BalancingLoss:
    """One term of the objective: its function, its layers, and the scope of its arguments."""

    function: Callable[..., Tensor]
    """Unweighted loss; its arguments depend on `scope`."""

    scope: Literal["layer", "model", "step"] = "layer"
    """`layer`: the function takes one Routing, and the loss is its mean over layers. (Pooled layers could
    collapse onto opposite halves unnoticed, and with a sum the effect of a weight would depend on the depth.)
    `model`: the function takes the Routings of all layers. `step`: the function takes a Routing and its
    layer's counts over all batches and ranks of the step, and the loss is its mean over layers."""

    applies_to: Callable[[Routing], bool] = lambda _: True
    """Return True for layers that contribute to the loss."""

    logged_at_zero_weight: bool = False
    """Compute and log the loss even if its weight is 0."""

    weight_set_by_rule: bool = False
    """True if a rule sets the weight at each step; otherwise the weight is an option."""

    unsupported_reason: Callable[[Routers], str | None] = lambda _: None
    """Return the reason why routers cannot have this loss, with an alternative; None if they can."""

    note: str = ""
    """Sentence that explains the curve of the loss."""

    def value(
        self, routings: Mapping[str, Routing], totals: StepTotals | None = None
    ) -> Tensor | None:
        """Return the unweighted loss, a scalar; None if it applies to no layer.

        Args:
            routings: routing of each layer.
            totals: totals of the optimizer step; None if this batch is the whole step.
        """
        layers = {name: routing for name, routing in routings.items() if self.applies_to(routing)}
        if not layers:
            return None
        if self.scope == "model":
            return self.function(list(layers.values()))
        if self.scope == "layer":
            return torch.stack([self.function(routing) for routing in layers.values()]).mean()
        totals = totals or count_step([layers])
        parts = [
            self.function(routing, totals.pairs_E[name], totals.num_tokens[name])
            for name, routing in layers.items()
        ]
        return totals.num_parts * torch.stack(parts).mean()


BALANCING_LOSSES: dict[str, BalancingLoss] = {
    "load_balance": BalancingLoss(
        load_balancing_loss,
        logged_at_zero_weight=True,
        note="Load balance is 1 if all experts get equal numbers of tokens.",
    ),
    "load_balance_sequence": BalancingLoss(sequence_load_balancing_loss),
    "importance_cv2": BalancingLoss(importance_cv2_loss),
    "load_cv2": BalancingLoss(load_cv2_loss, unsupported_reason=_reason_without_noise),
    "router_z": BalancingLoss(
        router_z_loss,
        # Not for ReLU routers: with negative logits they choose no expert and have no gradient to recover.
        applies_to=lambda routing: not isinstance(routing, SparsityTargetRouting),
        logged_at_zero_weight=True,
        note="Router z is the mean of logsumexp(logits)².",
    ),
    "router_entropy": BalancingLoss(router_entropy_loss, note="Router entropy is in nats."),
    "load_balance_pooled": BalancingLoss(
        pooled_load_balancing_loss, scope="model", unsupported_reason=_reason_not_poolable
    ),
    "load_balance_global": BalancingLoss(
        global_load_balancing_loss, scope="step", unsupported_reason=_reason_without_scores
    ),
    "relu_sparsity": BalancingLoss(
        relu_sparsity_loss,
        applies_to=lambda routing: isinstance(routing, SparsityTargetRouting),
        logged_at_zero_weight=True,
        weight_set_by_rule=True,
    ),
}
"""Losses by their name in metric rows (and in `BalancingWeights`), in the order of their sum."""
