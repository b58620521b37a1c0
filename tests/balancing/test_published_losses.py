"""Our losses, scale converted where it differs on purpose, are the numbers published libraries return.

The numbers are what each library's own function returned for the logits of `published_logits_LTE`:
Megatron-LM d98e8a6, transformers 5.23.0, DeepSpeed edaa722, Tutel ac0e51b, OLMo-core fa6c501,
MegaBlocks 78eea65, sonic-moe 8565e84, torchtitan b5bcd76. What routers and capacities return beside
them is in `tests/routing/test_published_routing.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_ffn.balancing.config import SignRuleConfig
from moe_ffn.balancing.losses import (
    importance_loss,
    load_balancing_loss,
    load_loss,
    pooled_load_balancing_loss,
    router_z_loss,
    sequence_load_balancing_loss,
)
from moe_ffn.outputs import Routing, TokenContext
from moe_ffn.routing.config import RouterConfig

# Printed to six digits (half a unit of the last: 5e-7), summed in float32 by both sides, each a few
# times 1e-7 of the value away from the exact sum.
PRINTED = 2e-6

PUBLISHED: dict[str, Any] = {
    "megatron aux_softmax_k1_per_layer": [1.082632, 1.024865, 1.147022],
    "megatron aux_sigmoid_k1_per_layer": [1.031349, 1.009504, 1.035619],
    "megatron aux_softmax_k2_per_layer": [1.024952, 1.004207, 1.082881],
    "megatron aux_sigmoid_k2_per_layer": [1.017988, 1.003404, 1.007019],
    "megatron seq_aux_k2_layer0_as_[seq=4,bsz=3]": 1.543242,
    "megatron z_loss_per_layer": [8.421222, 7.856539, 8.066414],
    "hf_mixtral k1_all_layers": 1.021135,
    "hf_mixtral k2_all_layers": 2.010882,
    "hf_mixtral k2_single_layers": [2.049905, 2.008415, 2.165762],
    "hf_mixtral k2_all_layers_mask_drop_tokens_3,10,11": 2.03601,
    "hf_switch top1_groups=layers": 1.084839,
    "hf_switch z_groups=layers": 8.114726,
    "hf_switch top2_groups=layers": 2.074693,
    "deepspeed top1_l_aux": 1.082632,
    "deepspeed top2_l_aux": 1.082632,
    "deepspeed topk2_probs l_aux": 1.024952,
    "deepspeed topk2_position l_aux": 1.024952,
    "tutel gshard_k2_layer0": 1.082631,
    "tutel load_importance_layer0_noise1_no_noise_drawn": 0.018822,
    "olmo_core lb_local_batch_k2_layer0_as_B3_S4": 1.024952,
    "olmo_core lb_instance_k2_layer0_as_B3_S4": 1.181028,
    "olmo_core z_layer0": 8.421222,
    "megablocks lbl_k1_w1": 1.084839,
    "megablocks lbl_k2_w1": 1.037347,
    "sonic_moe switch_k2_layer0": 1.024952,
    # Layer 0, k = 2; the moves of a bias that was 0, with a rate of 1e-3.
    "bias_update counts": [4, 3, 4, 3, 2, 4, 2, 2],
    "bias_update megatron/olmo(u=1e-3)": [-1e-3, 0, -1e-3, 0, 1e-3, -1e-3, 1e-3, 1e-3],
    "bias_update torchtitan": [-1e-3, 0, -1e-3, 0, 1e-3, -1e-3, 1e-3, 1e-3],
}

Ours = Callable[[Tensor], Any]
"""From logits (L, T, E) to the published number."""


def route(
    logits_TE: Tensor,
    k: int,
    *,
    router: str = "top_k",
    mask: Tensor | None = None,
    sequence_length: int | None = None,
    **options: Any,
) -> Routing:
    """A router whose projection is the identity, so that its logits are these."""
    num_experts = logits_TE.shape[-1]
    config = RouterConfig.model_validate({"type": router, "k": k, **options})
    built = config.build(num_experts, num_experts)
    with torch.no_grad():
        built.get_parameter("projection.weight").copy_(torch.eye(num_experts))
    return built(logits_TE, TokenContext(mask=mask, sequence_length=sequence_length))


def of_layers(loss: Callable[[Routing], Tensor], k: int, times: int = 1, **options: Any) -> Ours:
    """The loss of each layer, times what converts it."""
    return lambda logits_LTE: [
        times * loss(route(logits_TE, k, **options)).item() for logits_TE in logits_LTE
    ]


def of_layer_0(loss: Callable[[Routing], Tensor], k: int) -> Ours:
    return lambda logits_LTE: loss(route(logits_LTE[0], k)).item()


def mean_of_layers(loss: Callable[[Routing], Tensor], k: int, times: int = 1) -> Ours:
    return lambda logits_LTE: sum(of_layers(loss, k, times)(logits_LTE)) / len(logits_LTE)


def pooled(k: int, masked: tuple[int, ...] = ()) -> Ours:
    """Times k: Hugging Face counts tokens where we count pairs, and scores k at balance."""

    def ours(logits_LTE: Tensor) -> float:
        mask_T = torch.ones(logits_LTE.shape[1], dtype=torch.bool)
        mask_T[list(masked)] = False
        layers = [route(logits_TE, k, mask=mask_T) for logits_TE in logits_LTE]
        return k * pooled_load_balancing_loss(layers).item()

    return ours


def megatrons_sequences(logits_LTE: Tensor) -> float:
    # Megatron's tokens are sequence-major: token s * 3 + b is at position s of sequence b.
    logits_TE = logits_LTE[0].view(4, 3, 8).transpose(0, 1).reshape(12, 8)
    return sequence_load_balancing_loss(route(logits_TE, 2, sequence_length=4)).item()


def olmos_sequences(logits_LTE: Tensor) -> float:
    return sequence_load_balancing_loss(route(logits_LTE[0], 2, sequence_length=4)).item()


def tutels_load_and_importance(logits_LTE: Tensor) -> float:
    """Half the sum of two CV^2, of what Tutel calls importance and load; each differs from the paper.

    Its importance sums all probabilities, not those of the chosen: the weights of a router with k = E.
    Its load compares probabilities with a threshold among the logits, over noise of scale 1 / E.
    """
    logits_TE = logits_LTE[0]
    probs_TE, kth_T1 = logits_TE.softmax(dim=-1), logits_TE.topk(2).values[:, 1:]
    passed_TE = torch.special.ndtr((probs_TE - kth_T1) / (1 / 8))
    everybody = route(logits_TE, k=8)
    load = load_loss(replace(everybody, selection_probs_TE=passed_TE))
    return (importance_loss(everybody) + load).item() / 2


def counts(logits_LTE: Tensor) -> list[int]:
    return SignRuleConfig().build().observe(route(logits_LTE[0], 2), torch.zeros(8)).tolist()


def bias_after(centre: bool) -> Ours:
    rule = SignRuleConfig(rate=1e-3, centre=centre).build()
    return lambda logits_LTE: rule.update(
        torch.zeros(8), torch.tensor(counts(logits_LTE)), num_batches=1
    ).tolist()


OURS: dict[str, Ours] = {
    "megatron aux_softmax_k1_per_layer": of_layers(load_balancing_loss, 1),
    "megatron aux_softmax_k2_per_layer": of_layers(load_balancing_loss, 2),
    "megatron aux_sigmoid_k1_per_layer": of_layers(
        load_balancing_loss, 1, router="sigmoid_top_k", renormalize=False
    ),
    "megatron aux_sigmoid_k2_per_layer": of_layers(load_balancing_loss, 2, router="sigmoid_top_k"),
    "megatron seq_aux_k2_layer0_as_[seq=4,bsz=3]": megatrons_sequences,
    "megatron z_loss_per_layer": of_layers(router_z_loss, 2),
    "hf_mixtral k1_all_layers": pooled(1),
    "hf_mixtral k2_all_layers": pooled(2),
    "hf_mixtral k2_single_layers": of_layers(load_balancing_loss, 2, times=2),  # k, as above
    "hf_mixtral k2_all_layers_mask_drop_tokens_3,10,11": pooled(2, masked=(3, 10, 11)),
    # Groups are averaged; tokens are counted, not pairs: times k.
    "hf_switch top1_groups=layers": mean_of_layers(load_balancing_loss, 1),
    "hf_switch top2_groups=layers": mean_of_layers(load_balancing_loss, 2, times=2),
    "hf_switch z_groups=layers": mean_of_layers(router_z_loss, 1),
    # DeepSpeed's top-1 and top-2 gates and Tutel count each token's best expert alone: k = 1.
    "deepspeed top1_l_aux": of_layer_0(load_balancing_loss, 1),
    "deepspeed top2_l_aux": of_layer_0(load_balancing_loss, 1),
    "deepspeed topk2_probs l_aux": of_layer_0(load_balancing_loss, 2),
    "deepspeed topk2_position l_aux": of_layer_0(load_balancing_loss, 2),
    "tutel gshard_k2_layer0": of_layer_0(load_balancing_loss, 1),
    "tutel load_importance_layer0_noise1_no_noise_drawn": tutels_load_and_importance,
    "olmo_core lb_local_batch_k2_layer0_as_B3_S4": of_layer_0(load_balancing_loss, 2),
    "olmo_core lb_instance_k2_layer0_as_B3_S4": olmos_sequences,
    "olmo_core z_layer0": of_layer_0(router_z_loss, 2),
    "megablocks lbl_k1_w1": mean_of_layers(load_balancing_loss, 1),
    "megablocks lbl_k2_w1": mean_of_layers(load_balancing_loss, 2),
    "sonic_moe switch_k2_layer0": of_layer_0(load_balancing_loss, 2),
    "bias_update counts": counts,
    "bias_update megatron/olmo(u=1e-3)": bias_after(centre=False),
    "bias_update torchtitan": bias_after(centre=True),
}


def test_every_published_number_is_compared_with_one_of_ours() -> None:
    assert OURS.keys() == PUBLISHED.keys()


@pytest.mark.parametrize("entry", PUBLISHED)
def test_ours_is_the_published_number(entry: str, published_logits_LTE: Tensor) -> None:
    ours = OURS[entry](published_logits_LTE)
    assert ours == pytest.approx(PUBLISHED[entry], rel=PRINTED, abs=PRINTED)
