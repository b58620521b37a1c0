"""Numbers returned by the published libraries, reproduced by our functions.

`published_losses.json` holds them, with their sources. `OURS` says for each entry how our functions come
to it, and how the scale converts where ours differs on purpose; an entry without a line there fails.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn.balancing.bias_rules import SignRuleConfig
from moe_ffn.balancing.losses import (
    cv_squared,
    load_balancing_loss,
    pairs_per_expert,
    pooled_load_balancing_loss,
    router_z_loss,
    sequence_load_balancing_loss,
)
from moe_ffn.outputs import Routing
from moe_ffn.routing import SigmoidTopKRouterConfig, SinkhornRouterConfig, TopKRouterConfig
from moe_ffn.routing.capacity import by_position, by_probability, capacity_of, drop_over_capacity
from tests.helpers.every_router import route

PUBLISHED = json.loads(Path(__file__).with_name("published_losses.json").read_text("utf-8"))

# The inputs: 3 layers of 12 tokens and 8 experts, 2 sin(0.7 (t + 1)(e + 1) + 1.3 l).
LAYER, TOKEN, EXPERT = (
    torch.arange(size).view(shape)
    for size, shape in ((3, (3, 1, 1)), (12, (1, 12, 1)), (8, (1, 1, 8)))
)
LOGITS_LTE = 2 * torch.sin(0.7 * (TOKEN + 1) * (EXPERT + 1) + 1.3 * LAYER)
FIRST_TE = LOGITS_LTE[0]


def softmax(k: int, logits_TE: Tensor = FIRST_TE, **given: Any) -> Routing:
    return route(TopKRouterConfig(k=k), logits_TE, **given)


def softmax_layers(k: int, **given: Any) -> list[Routing]:
    return [softmax(k, logits_TE, **given) for logits_TE in LOGITS_LTE]


def per_layer(loss: Callable[[Routing], Tensor], routings: list[Routing]) -> list[float]:
    return [loss(routing).item() for routing in routings]


def mean_of_layers(loss: Callable[[Routing], Tensor], k: int) -> float:
    return sum(per_layer(loss, softmax_layers(k))) / 3


def sigmoid_layers(k: int) -> list[Routing]:
    config = SigmoidTopKRouterConfig(k=k, renormalize=False)
    return [route(config, logits_TE) for logits_TE in LOGITS_LTE]


def dense_weights(routing: Routing, token: int = 0) -> list[float]:
    """The weight of every expert for one token."""
    mine = routing.token_indices_N == token
    weights_E = torch.zeros(8)
    return weights_E.index_add(0, routing.expert_ids_N[mine], routing.weights_N[mine]).tolist()


def counts(routing: Routing) -> list[int]:
    return pairs_per_expert(routing).tolist()


def kept(routing: Routing) -> list[int]:
    return routing.expert_ids_N[routing.computed_N].bincount(minlength=8).tolist()


def grouped(score_top: int | None) -> Routing:
    """DeepSeek-V3's router: bias 0.3 cos(e), 2 of 4 groups, k = 2, scale 2.5."""
    config = SigmoidTopKRouterConfig.model_validate(
        {
            "k": 2,
            "scale": 2.5,
            "groups": {"num_groups": 4, "keep": 2, "score_top": score_top},
        }
    )
    return route(config, FIRST_TE, bias=(0.3 * torch.arange(8).cos()).tolist())


def sequence_major(logits_TE: Tensor, sequences: int) -> Tensor:
    """Megatron lays tokens out as (position, sequence); ours are (sequence, position)."""
    return logits_TE.view(-1, sequences, 8).transpose(0, 1).reshape(-1, 8)


def limited_top_2(priority: Callable[[Routing], Tensor]) -> Routing:
    """DeepSpeed's top-k gate: renormalised weights, capacity factor 1, renormalised survivors."""
    routing = route(TopKRouterConfig(k=2, renormalize=True), FIRST_TE)
    return drop_over_capacity(routing, 1.0, priority, renormalize=True)


def least_sum_of_weights(routing: Routing) -> float:
    """Smallest sum of a token's kept weights; 0 if a token keeps none."""
    sums_T = torch.zeros(routing.num_tokens).index_add(
        0,
        routing.token_indices_N[routing.computed_N],
        routing.weights_N[routing.computed_N],
    )
    return sums_T.min().item()


def top_2_gate(name: str, priority: Callable[[Routing], Tensor]) -> dict[str, Callable[[], Any]]:
    routing = limited_top_2(priority)
    return {
        f"deepspeed/{name}/l_aux": lambda: load_balancing_loss(routing).item(),
        f"deepspeed/{name}/capacity": lambda: int(capacity_of(routing, 1.0)),
        f"deepspeed/{name}/kept": lambda: int(routing.computed_N.sum()),
        f"deepspeed/{name}/gates_token0": lambda: routing.weights_N[:2].tolist(),
        f"deepspeed/{name}/gates_rowsum_min": lambda: least_sum_of_weights(routing),
    }


def tutels_importance_and_load() -> float:
    """Half of CV^2 of importance and of load, without the noise that was asked for but not drawn.

    Its load is Phi((p - threshold) / (1 / E)), with the k-th logit as the threshold of probabilities.
    """
    routing = softmax(2)
    assert routing.logits_TE is not None
    assert routing.scores_TE is not None
    threshold_T1 = routing.logits_TE.topk(2).values[:, -1:]
    load_TE = torch.special.ndtr((routing.scores_TE - threshold_T1) * 8)
    return (cv_squared(routing.scores_TE.sum(0)) + cv_squared(load_TE.sum(0))).item() / 2


def bias_after(centre: bool) -> list[float]:
    rule = SignRuleConfig(rate=1e-3, centre=centre)
    observed_E = torch.tensor(PUBLISHED["bias_update"]["counts"]).long()
    return rule.update(torch.zeros(8), observed_E, num_batches=1).tolist()


MASK_LT = torch.ones(3, 12, dtype=torch.bool)
MASK_LT[:, [3, 10, 11]] = False

OURS: dict[str, Callable[[], Any]] = {
    "megatron/aux_softmax_k1_per_layer": lambda: per_layer(load_balancing_loss, softmax_layers(1)),
    "megatron/aux_softmax_k2_per_layer": lambda: per_layer(load_balancing_loss, softmax_layers(2)),
    "megatron/aux_sigmoid_k1_per_layer": lambda: per_layer(load_balancing_loss, sigmoid_layers(1)),
    "megatron/aux_sigmoid_k2_per_layer": lambda: per_layer(load_balancing_loss, sigmoid_layers(2)),
    "megatron/seq_aux_k2_layer0_as_[seq=4,bsz=3]": lambda: sequence_load_balancing_loss(
        softmax(2, sequence_major(FIRST_TE, 3), sequence_length=4)
    ).item(),
    "megatron/z_loss_per_layer": lambda: per_layer(router_z_loss, softmax_layers(1)),
    "megatron/get_capacity(T*k=24,E=8,cf=1.25)": lambda: int(capacity_of(softmax(2), 1.25)),
    "megatron/probs_row0_post_softmax_k2": lambda: dense_weights(
        route(TopKRouterConfig(k=2, softmax="after"), FIRST_TE)
    ),
    "megatron/probs_row0_pre_softmax_k2": lambda: dense_weights(softmax(2)),
    # Megatron scores a group by its top k / keep = 1 experts.
    "megatron/probs_row0_sigmoid_bias(0.3cos e)_groups4_top2_scale2.5_k2": lambda: dense_weights(
        grouped(score_top=None)
    ),
    "megatron/counts_same": lambda: counts(grouped(score_top=None)),
    "megatron/cf1.0_before": lambda: counts(softmax(2)),
    "megatron/cf1.0_probs_policy_kept_per_expert_k2": lambda: kept(
        drop_over_capacity(softmax(2), 1.0, by_probability)
    ),
    "megatron/cf1.0_capacity": lambda: int(capacity_of(softmax(2), 1.0)),
    "megatron/sinkhorn_argmax_layer0": lambda: route(
        SinkhornRouterConfig(k=1), FIRST_TE, training=True
    ).expert_ids_N.tolist(),
    # Hugging Face counts tokens and not pairs, so its balance is k; and it pools all layers.
    "hf_mixtral/k1_all_layers": lambda: pooled_load_balancing_loss(softmax_layers(1)).item(),
    "hf_mixtral/k2_all_layers": lambda: 2 * pooled_load_balancing_loss(softmax_layers(2)).item(),
    "hf_mixtral/k2_single_layers": lambda: [
        2 * value for value in per_layer(load_balancing_loss, softmax_layers(2))
    ],
    "hf_mixtral/k2_all_layers_mask_drop_tokens_3,10,11": lambda: (
        2 * pooled_load_balancing_loss(softmax_layers(2, mask=MASK_LT[0])).item()
    ),
    # Its groups are the layers here: the mean over groups is ours over layers. Top-2 counts tokens.
    "hf_switch/top1_groups=layers": lambda: mean_of_layers(load_balancing_loss, 1),
    "hf_switch/z_groups=layers": lambda: mean_of_layers(router_z_loss, 1),
    "hf_switch/top2_groups=layers": lambda: 2 * mean_of_layers(load_balancing_loss, 2),
    # DeepSpeed's top-1 and top-2 gates balance only the first choice.
    "deepspeed/top1_l_aux": lambda: load_balancing_loss(softmax(1)).item(),
    "deepspeed/top1_capacity_cf1": lambda: int(capacity_of(softmax(1), 1.0)),
    "deepspeed/top1_counts": lambda: counts(softmax(1)),
    "deepspeed/top1_kept": lambda: sum(kept(drop_over_capacity(softmax(1), 1.0, by_position))),
    "deepspeed/top2_l_aux": lambda: load_balancing_loss(softmax(1)).item(),
    "deepspeed/top2_capacity_cf1": lambda: int(capacity_of(softmax(2), 1.0)),
    "deepspeed/top2_kept": lambda: sum(kept(drop_over_capacity(softmax(2), 1.0, by_position))),
    "deepspeed/top2_counts": lambda: counts(softmax(2)),
    **top_2_gate("topk2_probs", by_probability),
    **top_2_gate("topk2_position", by_position),
    # Tutel's gshard loss balances only the first choice.
    "tutel/gshard_k2_layer0": lambda: load_balancing_loss(softmax(1)).item(),
    "tutel/load_importance_layer0_noise1_no_noise_drawn": tutels_importance_and_load,
    "olmo_core/lb_local_batch_k2_layer0_as_B3_S4": lambda: load_balancing_loss(softmax(2)).item(),
    "olmo_core/lb_instance_k2_layer0_as_B3_S4": lambda: sequence_load_balancing_loss(
        softmax(2, sequence_length=4)
    ).item(),
    "olmo_core/z_layer0": lambda: router_z_loss(softmax(2)).item(),
    "megablocks/lbl_k1_w1": lambda: mean_of_layers(load_balancing_loss, 1),
    "megablocks/lbl_k2_w1": lambda: mean_of_layers(load_balancing_loss, 2),
    "sonic_moe/switch_k2_layer0": lambda: load_balancing_loss(softmax(2)).item(),
    # DeepSeek-V3 and its copies score a group by its top 2.
    "hf_deepseek_v3/token0_idx": lambda: sorted(grouped(score_top=2).expert_ids_N[:2].tolist()),
    "hf_deepseek_v3/token0_w": lambda: dense_weights(grouped(score_top=2))[:2],
    "hf_deepseek_v3/counts": lambda: counts(grouped(score_top=2)),
    "bias_update/megatron/olmo(u=1e-3)": lambda: bias_after(centre=False),
    "bias_update/torchtitan": lambda: bias_after(centre=True),
}
"""Entry of the file -> what our functions make of the same input, in the library's scale."""

DESCRIBE_INPUTS = {"source", "inputs", "hf_deepseek_v3/router_weight", "bias_update/counts"}


def leaves(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if path in DESCRIBE_INPUTS:
            continue
        found |= leaves(value, f"{path}/") if isinstance(value, dict) else {path: value}
    return found


ENTRIES = leaves(PUBLISHED)


def test_every_entry_has_a_line_and_every_line_an_entry() -> None:
    assert set(OURS) == set(ENTRIES)
    assert len(ENTRIES) > 50


@pytest.mark.parametrize("entry", ENTRIES)
def test_ours_equals_the_published_number(entry: str) -> None:
    published, ours = ENTRIES[entry], OURS[entry]()
    if isinstance(published, int):
        assert ours == published
    else:
        # Printed to six digits after the point, of float32 values up to 10.
        assert ours == pytest.approx(published, abs=1e-5)


def test_the_inputs_are_those_of_the_file() -> None:
    assert [PUBLISHED["inputs"][size] for size in "LTE"] == [3, 12, 8]
    # l = 1, t = 2, e = 3: 2 sin(0.7 * 3 * 4 + 1.3)
    assert LOGITS_LTE[1, 2, 3].item() == pytest.approx(2 * math.sin(9.7), abs=1e-6)
