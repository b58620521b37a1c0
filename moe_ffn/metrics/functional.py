"""Routing metrics as pure functions of one layer's `Routing` or of its counts.

T tokens, E experts, K experts per token, N (token, expert) pairs, B sequences
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from moe_ffn.balancing.sums import takes_routing
from moe_ffn.config.base import require_count
from moe_ffn.outputs import FFNOutput, PairsOnlyRouting, Routing


def _require_tensors(function: str, advice: str, *values: object) -> None:
    """Raise TypeError if a value is a list or a routing; `advice` says what to use instead of a routing."""
    for value in values:
        if isinstance(value, list | tuple | Routing | FFNOutput):
            hint = "use torch.tensor(...)" if isinstance(value, list | tuple) else advice
            raise TypeError(
                f"{function} takes tensors, but got a value of type {type(value).__name__}; {hint}"
            )


# -- load


def _as_floating(load_E: Tensor, function: str) -> Tensor:
    """Return the load as floating point; counts become float64, which represents them exactly."""
    _require_tensors(
        function, "LoadMetrics measures the load of a Routing, over many batches", load_E
    )
    return load_E if load_E.dtype.is_floating_point else load_E.double()


def max_violation(load_E: Tensor) -> Tensor:
    """Return MaxVio = (max - mean) / mean of the load: 0 at balance, E - 1 if one expert has all tokens.

    Wang et al. 2024, "Auxiliary-Loss-Free Load Balancing Strategy" (arXiv:2408.15664), section 4.1.
    Reduces only the last axis.
    """
    load_E = _as_floating(load_E, "max_violation")
    mean = load_E.mean(dim=-1)
    tiny = torch.finfo(load_E.dtype).tiny
    return (load_E.amax(dim=-1) - mean) / mean.clamp(min=tiny)


def load_cv(load_E: Tensor) -> Tensor:
    """Return the coefficient of variation, standard deviation / mean: 0 at balance, sqrt(E - 1) at worst."""
    load_E = _as_floating(load_E, "load_cv")
    tiny = torch.finfo(load_E.dtype).tiny
    return load_E.std(dim=-1, correction=0) / load_E.mean(dim=-1).clamp(min=tiny)


def load_entropy(load_E: Tensor) -> Tensor:
    """Return the entropy of the load over log E: 1 at balance, 0 if one expert has all tokens.

    Reduces only the last axis. A single expert gives 1; a load of zeros gives nan.
    """
    load_E = _as_floating(load_E, "load_entropy")
    share_E = load_E / load_E.sum(dim=-1, keepdim=True)
    entropy = torch.special.entr(share_E).sum(dim=-1)
    return entropy / math.log(load_E.shape[-1]) if load_E.shape[-1] > 1 else entropy + 1


def rank_max_violation(load_E: Tensor, num_ranks: int) -> Tensor:
    """Return MaxVio over ranks; the load of a rank is the sum over its experts, which are split in order.

    Expert parallelism waits for the busiest rank, so the experts take 1 + MaxVio times as long as at balance.
    Returns nan if `num_ranks` does not divide the number of experts.

    Raises:
        ConfigError: `num_ranks` is not a whole number of at least 1.
    """
    load_E = _as_floating(load_E, "rank_max_violation")
    require_count(num_ranks, "num_ranks")
    if load_E.shape[-1] % num_ranks:
        return load_E.new_tensor(torch.nan)
    return max_violation(load_E.unflatten(-1, (num_ranks, -1)).sum(dim=-1))


# -- tokens


def top1_margin(scores_TE: Tensor) -> Tensor:
    """Return the best minus the second-best normalised score, (T,): how confident the router is.

    Returns nan for a single expert.
    """
    _require_tensors("top1_margin", "use routing.scores_TE, normalised to sum to 1", scores_TE)
    if scores_TE.shape[-1] == 1:
        return torch.full_like(scores_TE[..., 0], torch.nan)
    best_T, second_T = scores_TE.topk(2, dim=-1).values.unbind(dim=-1)
    return best_T - second_T


@takes_routing
def logit_max(routing: Routing) -> Tensor:
    """Return the largest finite |logit| of a real token, a scalar; `nonfinite_tokens` counts other tokens."""
    if isinstance(routing, PairsOnlyRouting):
        magnitudes, counted = routing.logits_N.abs(), routing.active_N
    else:
        magnitudes = routing.require("logits_TE", "logit_max").abs()
        counted = torch.tensor(True) if routing.mask_T is None else routing.mask_T.unsqueeze(-1)
    magnitudes = torch.where(magnitudes.isfinite() & counted, magnitudes, 0).flatten()
    return magnitudes.max() if len(magnitudes) else magnitudes.sum()


@takes_routing
def nonfinite_tokens(routing: Routing) -> Tensor:
    """Return the number of real tokens with a NaN or infinite logit, a scalar."""
    # A sum of logits is finite only if each logit is; a sum that overflows counts as infinite too.
    if isinstance(routing, PairsOnlyRouting):
        zeros_T = routing.logits_N.new_zeros(routing.num_tokens)
        nonfinite_T = ~zeros_T.index_add(0, routing.token_indices_N, routing.logits_N).isfinite()
    else:
        nonfinite_T = ~routing.require("logits_TE", "nonfinite_tokens").sum(dim=-1).isfinite()
    return (nonfinite_T if routing.mask_T is None else nonfinite_T & routing.mask_T).sum()


# -- chosen experts


@takes_routing
def chosen_experts(routing: Routing) -> Tensor:
    """Return a bool mask (T, E) of the experts that each real token chose, before dropping."""
    cells_N = routing.token_indices_N * routing.num_experts + routing.expert_ids_N
    shape = (routing.num_tokens, routing.num_experts)
    selected_N = routing.active_N.to(torch.uint8)
    # A pair may be listed twice, once chosen and once not; `amax` acts as a logical or.
    chosen = selected_N.new_zeros(shape).flatten().scatter_reduce(0, cells_N, selected_N, "amax")
    return chosen.bool().view(shape)


@takes_routing
def coactivation_counts(routing: Routing) -> Tensor:
    """Return the number of tokens that chose both experts of a pair, int64 (E, E); diagonal: one expert."""
    chosen_TE = chosen_experts(routing).float()
    # float32 counts exactly up to 16 million tokens, the bfloat16 of autocast only up to 256.
    with torch.autocast(chosen_TE.device.type, enabled=False):
        return (chosen_TE.t() @ chosen_TE).long()


def coactivation(counts_EE: Tensor) -> Tensor:
    """Return the share of expert i's tokens that also chose expert j, (E, E); rows of unused experts are 0.

    Muennighoff et al. 2024, "OLMoE" (arXiv:2409.02060), section 5.2.
    """
    _require_tensors("coactivation", "use coactivation_counts(routing)", counts_EE)
    return counts_EE / counts_EE.diagonal().clamp(min=1).unsqueeze(-1)


def churn(before_TE: Tensor, after_TE: Tensor) -> Tensor:
    """Return the share of tokens whose experts changed between two routings of the same tokens.

    Muennighoff et al. 2024 (arXiv:2409.02060), section 5.1, call the unchanged share router saturation.

    Args:
        before_TE: `chosen_experts` of the earlier routing, bool (T, E).
        after_TE: `chosen_experts` of the later routing, bool (T, E).

    Raises:
        ValueError: the shapes differ.
    """
    _require_tensors("churn", "use chosen_experts(routing)", before_TE, after_TE)
    if before_TE.shape != after_TE.shape:
        raise ValueError(
            f"churn compares two routings of the same tokens and experts, but got shapes "
            f"{tuple(before_TE.shape)} and {tuple(after_TE.shape)}"
        )
    return (before_TE != after_TE).any(dim=-1).float().mean()


def idle_steps(before_E: Tensor, load_E: Tensor, num_steps: int) -> Tensor:
    """Return the steps since each expert last had a token, int64 (E,).

    Args:
        before_E: the same count, `num_steps` steps earlier.
        load_E: load of the steps since then.
    """
    return torch.where(load_E > 0, 0, before_E + num_steps)
