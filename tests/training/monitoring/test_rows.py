from __future__ import annotations

import torch

from moe_ffn.training.monitoring.callbacks import routing_row


def test_a_row_has_one_key_for_a_load_and_none_for_nan() -> None:
    values = {
        "layer_03": {
            "entropy": torch.tensor(0.5),
            "load": torch.tensor([0.25, 0.75]),
            "coactivation": torch.eye(2),
        },
        "layer_12": {"capacity_used": torch.tensor(torch.nan), "dead_experts": torch.tensor(2)},
    }

    assert routing_row(values, prefix="validation/") == {
        "validation/routing/layer_03/entropy": 0.5,
        "validation/routing/layer_03/load": [0.25, 0.75],
        "validation/routing/layer_12/dead_experts": 2,
    }
