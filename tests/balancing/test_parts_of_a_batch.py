"""Balancing rules on one logical batch that is divided, into parts or into sequences."""

from __future__ import annotations

import pytest
import torch

from moe_ffn.balancing.losses import (
    global_load_balancing_loss,
    load_balancing_loss,
    load_cv2_loss,
    pairs_per_expert,
    sequence_load_balancing_loss,
)
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


def test_the_load_loss_of_parts_is_not_that_of_the_whole() -> None:
    """Gradients of the other losses, of a batch in parts: `tests/training/test_invariance.py`."""
    logits = random_logits(48, 4).requires_grad_()
    whole, *parts = (load_cv2_loss(routing_of(part)) for part in (logits, *logits.chunk(4)))
    expected, found = (
        torch.autograd.grad(loss, logits)[0] for loss in (whole, torch.stack(parts).mean())
    )
    assert (found - expected).norm() > 0.01 * expected.norm()
