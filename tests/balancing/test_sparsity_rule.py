"""The weight of the ReLU sparsity loss rises while too many experts are chosen, and falls otherwise."""

from __future__ import annotations

import pytest
import torch

from moe_ffn.balancing.bias_rules import sparsity_weight_after
from moe_ffn.balancing.losses import pairs_per_expert, relu_sparsity_loss
from moe_ffn.outputs import TokenContext
from moe_ffn.routing import ReLURouterConfig


@pytest.mark.parametrize(
    ("density", "expected"),
    [(1.5, 3.6), (1.0001, 3.6), (1.0, 3.0), (0.9999, 2.5), (0.0, 2.5)],  # 3 * 1.2, 3 / 1.2
    ids=["far_above", "above", "at_the_target", "below", "nobody"],
)
def test_the_weight_is_multiplied_above_the_target_and_divided_below(
    density: float, expected: float
) -> None:
    weight = torch.tensor(3.0, dtype=torch.float64)
    after = sparsity_weight_after(weight, torch.tensor(density, dtype=torch.float64), factor=1.2)
    assert after.item() == pytest.approx(expected, rel=1e-12)
    assert after.dtype == torch.float64
    assert weight.item() == 3


def test_loss_and_rule_together_bring_a_router_to_its_number_of_experts() -> None:
    torch.manual_seed(0)
    router = ReLURouterConfig(k=2, bias=True).build(16, 8)  # the bias moves every token at once
    x_TD = torch.randn(256, 16)
    weight = torch.tensor(1e-3)
    optimizer = torch.optim.SGD(router.parameters(), lr=0.1)
    densities = []
    for _ in range(400):
        routing = router(x_TD, TokenContext())
        density = pairs_per_expert(routing).sum() / (2 * 256)
        densities.append(density.item())
        # Something to learn pulls the scores up; the loss has to hold them down against it.
        wish = -0.1 * routing.scores_TE.sum(dim=-1).clamp(max=4).mean()
        optimizer.zero_grad()
        (wish + weight * relu_sparsity_loss(routing)).backward()
        optimizer.step()
        weight = sparsity_weight_after(weight, density, factor=1.05)
    assert densities[0] > 1.5  # about half of the 8 experts
    # The rule swings about its target: the mean of the last quarter.
    assert sum(densities[-100:]) / 100 == pytest.approx(1, abs=0.1)
