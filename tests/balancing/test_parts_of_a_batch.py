"""Balancing rules on one logical batch that is divided, into parts or into sequences."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from moe_ffn.balancing.losses import (
    global_load_balancing_loss,
    importance_cv2_loss,
    load_balancing_loss,
    load_cv2_loss,
    pairs_per_expert,
    pooled_load_balancing_loss,
    router_entropy_loss,
    router_z_loss,
    sequence_load_balancing_loss,
)
from moe_ffn.outputs import Routing
from tests.helpers.every_loss import random_logits, routing_of

# Sums of some hundred float64 numbers in another order.
EXACT = 1e-12

# ------------------------------------------------------------------------------- the global rule

LENGTHS: dict[str, list[int]] = {
    "one_part": [24],
    "even_parts": [6, 6, 6, 6],
    "uneven_parts": [1, 14, 2, 7],
    "a_part_without_tokens": [10, 0, 14],
}


@pytest.mark.parametrize("padded", [False, True], ids=["full", "padded"])
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_the_parts_of_the_global_loss_add_up_to_the_loss_of_the_whole(
    lengths: list[int], padded: bool
) -> None:
    logits = random_logits(24, 8).requires_grad_()
    # Unevenly: nearly all of the first tokens, and a few of the rest.
    mask = (torch.arange(24) > 4) & (torch.arange(24) % 7 != 0) if padded else None
    whole = load_balancing_loss(routing_of(logits, mask=mask))
    (expected,) = torch.autograd.grad(whole, logits)

    masks = [None] * len(lengths) if mask is None else mask.split(lengths)
    parts = [routing_of(z, mask=m) for z, m in zip(logits.split(lengths), masks, strict=True)]
    pairs_E = torch.stack([pairs_per_expert(part) for part in parts]).sum(dim=0)
    num_tokens = torch.stack([part.num_real_tokens for part in parts]).sum()
    losses = [global_load_balancing_loss(part, pairs_E, num_tokens) for part in parts]
    total = torch.stack(losses).sum()
    # Each part by itself, as accumulated micro-batches and ranks have it.
    gradient = sum(torch.autograd.grad(loss, logits, retain_graph=True)[0] for loss in losses)

    torch.testing.assert_close(total, whole, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(gradient, expected, rtol=EXACT, atol=EXACT)


def test_the_global_loss_of_a_step_without_tokens_is_zero() -> None:
    empty = routing_of(torch.zeros(0, 4))
    loss = global_load_balancing_loss(empty, torch.zeros(4, dtype=torch.int64), torch.tensor(0))
    assert loss.item() == 0


# ------------------------------------------------------------------------------- sequences


def test_the_sequence_loss_is_the_mean_of_the_loss_of_each() -> None:
    # Four sequences of five tokens: whole, padded on the right, padded on the left, nothing but padding.
    logits = random_logits(20, 4).requires_grad_()
    mask_BS = torch.ones(4, 5, dtype=torch.bool)
    mask_BS[1, 3:] = False
    mask_BS[2, :4] = False
    mask_BS[3] = False
    got = sequence_load_balancing_loss(
        routing_of(logits, mask=mask_BS.flatten(), sequence_length=5)
    )
    each = [
        load_balancing_loss(routing_of(z[real]))
        for z, real in zip(logits.view(4, 5, 4)[:3], mask_BS[:3], strict=True)
    ]
    expected = torch.stack(each).mean()
    torch.testing.assert_close(got, expected, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(
        torch.autograd.grad(got, logits), torch.autograd.grad(expected, logits), rtol=0, atol=EXACT
    )


# ------------------------------------------------------------------------------- which rules survive

NUM_PARTS, SEQUENCES, LENGTH, NUM_EXPERTS = 4, 2, 6, 4
"""Micro-batches of a batch, sequences of a micro-batch, tokens of a sequence."""

Rule = Callable[[Sequence[Routing], Sequence[Routing]], Tensor]
"""(both layers of a part, both layers of the whole batch) -> what the part contributes to a mean."""


def per_layer(loss: Callable[[Routing], Tensor]) -> Rule:
    return lambda part, whole: torch.stack([loss(layer) for layer in part]).mean()


def global_rule(part: Sequence[Routing], whole: Sequence[Routing]) -> Tensor:
    """Loss of one part times the number of parts, because the mean over parts is taken later."""
    num_parts = whole[0].num_tokens // part[0].num_tokens
    losses = [
        global_load_balancing_loss(layer, pairs_per_expert(all_of_it), all_of_it.num_real_tokens)
        for layer, all_of_it in zip(part, whole, strict=True)
    ]
    return num_parts * torch.stack(losses).mean()


SURVIVES: dict[str, tuple[Rule, bool, bool]] = {
    # rule: with equally many real tokens in every part, and with more padding in some than in others
    "load_balance_global": (global_rule, True, True),
    "load_balance_sequence": (per_layer(sequence_load_balancing_loss), True, True),
    "router_z": (per_layer(router_z_loss), True, False),
    "router_entropy": (per_layer(router_entropy_loss), True, False),
    "load_balance": (per_layer(load_balancing_loss), False, False),
    "load_balance_pooled": (lambda part, whole: pooled_load_balancing_loss(part), False, False),
    "importance_cv2": (per_layer(importance_cv2_loss), False, False),
    "load_cv2": (per_layer(load_cv2_loss), False, False),
}
"""True if the mean over 4 micro-batches of equal size is the batch: `docs/reference/balancing.md`.

The sequence rule survives padding as long as every part has equally many sequences that are not all
padding.
"""


@pytest.mark.parametrize("padded", [False, True], ids=["equal_tokens", "uneven_padding"])
@pytest.mark.parametrize("name", SURVIVES)
def test_the_mean_over_micro_batches_is_the_whole_batch_exactly_for_these_rules(
    name: str, padded: bool
) -> None:
    rule, survives_equal, survives_padding = SURVIVES[name]
    num_tokens = NUM_PARTS * SEQUENCES * LENGTH
    layers = torch.stack([random_logits(num_tokens, NUM_EXPERTS, seed) for seed in (0, 1)])
    logits_LTE = layers.requires_grad_()
    mask_T = torch.ones(num_tokens, dtype=torch.bool)
    if padded:
        mask_T[3:6] = False  # only of the first part
        mask_T[8:12] = False

    def routings(tokens: slice) -> list[Routing]:
        return [
            routing_of(logits_TE[tokens], mask=mask_T[tokens], sequence_length=LENGTH)
            for logits_TE in logits_LTE
        ]

    whole = routings(slice(None))
    size = num_tokens // NUM_PARTS
    parts = [routings(slice(n * size, (n + 1) * size)) for n in range(NUM_PARTS)]
    expected = rule(whole, whole)
    got = torch.stack([rule(part, whole) for part in parts]).mean()
    (expected_gradient,) = torch.autograd.grad(expected, logits_LTE)
    (gradient,) = torch.autograd.grad(got, logits_LTE)

    same_value = torch.allclose(got, expected, rtol=EXACT, atol=EXACT)
    same_gradient = torch.allclose(gradient, expected_gradient, rtol=EXACT, atol=EXACT)
    survives = survives_padding if padded else survives_equal
    assert (same_value, same_gradient) == (survives, survives)
    if not survives:  # by far more than rounding
        distance = (gradient - expected_gradient).norm() / expected_gradient.norm()
        assert distance > 0.01
