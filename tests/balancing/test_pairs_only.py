"""Losses and usage of listed pairs, against tables of all experts written out.

T tokens, E experts, B sequences
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn import TokenContext, routing_of_pairs
from moe_ffn.balancing.losses import (
    importance_cv2_loss,
    load_balancing_loss,
    router_entropy_loss,
    router_z_loss,
    sequence_load_balancing_loss,
)
from moe_ffn.balancing.pairs_only import num_used, usage_kl
from moe_ffn.metrics import logit_max, nonfinite_tokens
from moe_ffn.outputs import PairsOnlyRouting, Routing

NUM_EXPERTS, B, S, K = 9, 3, 4, 5


def as_list(logits_TK: Tensor) -> dict[str, Any]:
    return {
        "num_experts": NUM_EXPERTS,
        "kind": PairsOnlyRouting,
        "logits_N": logits_TK.flatten(),
        "pairs_per_token": logits_TK.shape[1],
    }


def listed(padded: bool = True) -> tuple[Routing, Tensor]:
    """A routing of pairs, some of one token and expert twice; and its logits, which have gradients."""
    generator = torch.Generator().manual_seed(0)
    ids_TK = torch.randint(NUM_EXPERTS - 2, (B * S, K), generator=generator)
    logits_TK = torch.randn(B * S, K, generator=generator, dtype=torch.float64).requires_grad_()
    mask_T = torch.ones(B * S, dtype=torch.bool)
    if padded:
        mask_T[S - 1] = False
        mask_T[2 * S :] = False
    context = TokenContext(mask_T if padded else None, sequence_length=S)
    weights_TK = 3 * logits_TK.sigmoid()
    more: dict[str, Any] = as_list(logits_TK)
    return routing_of_pairs(weights_TK, ids_TK, None, None, context, **more), logits_TK


def share_table(routing: Routing) -> tuple[Tensor, Tensor]:
    """(T, E): each expert's share of a token's weights, and how often it is listed; 0 for padding."""
    shape = (routing.num_tokens, routing.num_experts)
    weights_TE, counts_TE = (torch.zeros(shape, dtype=torch.float64) for _ in range(2))
    for n in routing.active_N.nonzero().flatten().tolist():
        cell = torch.zeros(shape, dtype=torch.float64)
        cell[routing.token_indices_N[n], routing.expert_ids_N[n]] = 1
        weights_TE, counts_TE = weights_TE + routing.weights_N[n] * cell, counts_TE + cell
    return weights_TE / weights_TE.sum(1, keepdim=True).clamp(min=1e-300), counts_TE


def balance(shares_TE: Tensor, counts_TE: Tensor) -> Tensor:
    num_tokens = (counts_TE.sum(1) > 0).sum()
    return NUM_EXPERTS * (counts_TE.sum(0) / counts_TE.sum() * shares_TE.sum(0) / num_tokens).sum()


def load_balance(routing: Routing) -> Tensor:
    return balance(*share_table(routing))


def of_sequences(routing: Routing) -> Tensor:
    parts = zip(*(table.split(S) for table in share_table(routing)), strict=True)
    return torch.stack([balance(*part) for part in parts if part[1].any()]).mean()


def importance(routing: Routing) -> Tensor:
    importance_E = torch.zeros(NUM_EXPERTS, dtype=torch.float64)
    importance_E = importance_E.index_add(
        0, routing.expert_ids_N[routing.active_N], routing.weights_N[routing.active_N]
    )
    return importance_E.var() / importance_E.mean() ** 2


def real_rows(routing: Routing, values_N: Tensor) -> Tensor:
    """(real tokens, K)"""
    rows = values_N.view(-1, K)
    return rows if routing.mask_T is None else rows[routing.mask_T]


def z_loss(routing: Routing) -> Tensor:
    assert isinstance(routing, PairsOnlyRouting)
    return real_rows(routing, routing.logits_N).logsumexp(1).square().mean()


def entropy(routing: Routing) -> Tensor:
    shares = real_rows(routing, routing.weights_N)
    shares = shares / shares.sum(1, keepdim=True)
    return -(shares * shares.log()).sum(1).mean()


def divergence(routing: Routing) -> Tensor:
    shares_TE, counts_TE = share_table(routing)
    usage_E = shares_TE.sum(0) / (counts_TE.sum(1) > 0).sum()
    return math.log(NUM_EXPERTS) - torch.special.entr(usage_E[usage_E > 0]).sum()


PAIRS: dict[str, tuple[Callable[[Routing], Tensor], Callable[[Routing], Tensor]]] = {
    "load_balance": (load_balancing_loss, load_balance),
    "load_balance_sequence": (sequence_load_balancing_loss, of_sequences),
    "importance_cv2": (importance_cv2_loss, importance),
    "router_z": (router_z_loss, z_loss),
    "router_entropy": (router_entropy_loss, entropy),
    "usage_kl": (usage_kl, divergence),
}


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize(("ours", "written_out"), PAIRS.values(), ids=PAIRS)
def test_values_and_gradients_are_those_of_tables(
    ours: Callable[[Routing], Tensor], written_out: Callable[[Routing], Tensor], padded: bool
) -> None:
    routing, logits_TK = listed(padded)
    value, expected = ours(routing), written_out(routing)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    (gradient,) = torch.autograd.grad(value, logits_TK, retain_graph=True)
    (wanted,) = torch.autograd.grad(expected, logits_TK)
    assert wanted.abs().max() > 1e-6
    torch.testing.assert_close(gradient, wanted, rtol=1e-10, atol=1e-12)


def test_experts_that_real_tokens_chose_are_counted_once() -> None:
    for padded in (False, True):
        routing, _ = listed(padded)
        assert num_used(routing) == len(routing.expert_ids_N[routing.active_N].unique())


def test_no_token_is_no_loss() -> None:
    nothing = torch.zeros(0, 2)
    more = as_list(nothing)
    routing = routing_of_pairs(nothing, nothing.long(), None, None, TokenContext(), **more)
    found = {name: ours(routing).item() for name, (ours, _) in PAIRS.items() if name != "usage_kl"}
    assert found == dict.fromkeys(found, 0.0)
    assert num_used(routing) == 0


def test_broken_logits_are_counted_by_token() -> None:
    routing, logits_TK = listed()
    with torch.no_grad():
        largest = logits_TK[routing.mask_T].abs().max()
        logits_TK[0, :2] = torch.nan
        logits_TK[5, 1] = torch.inf
        logits_TK[-1, 0] = 1e9  # of padding
    assert nonfinite_tokens(routing) == 2
    assert logit_max(routing) == largest
