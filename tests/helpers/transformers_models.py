"""Small models of transformers with random weights, of each family whose experts it lets others compute."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    **dict.fromkeys(("intermediate_size", "moe_intermediate_size"), 24),
    "shared_expert_intermediate_size": 16,
    "num_attention_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    **dict.fromkeys(("num_hidden_layers", "num_key_value_heads"), 2),
    **dict.fromkeys(("num_experts_per_tok", "moe_topk", "moe_k"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers"), 0),
    **dict.fromkeys(("n_group", "n_shared_experts", "topk_group"), 1),
    "attn_implementation": "eager",
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LATENT = {
    "num_key_value_heads": 4,
    **dict.fromkeys(("kv_lora_rank", "q_lora_rank"), 8),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 8),
}
MAMBA: dict[str, Any] = dict.fromkeys(
    ("mamba_num_heads", "mamba_head_dim", "ssm_state_size", "chunk_size"), 8
)
FAMILIES: dict[str, dict[str, Any]] = {
    "afmoe": {}, "cohere2_moe": {}, "deepseek_v3": LATENT, "dots1": {}, "ernie4_5_moe": {},
    "exaone_moe": {}, "flex_olmo": {}, "glm4_moe": {}, "gpt_oss": {}, "granitemoe": {},
    "hunyuan_v1_moe": {}, "jamba": {}, "minimax_m2": {}, "mixtral": {}, "nemotron_h": MAMBA,
    "olmoe": {}, "phimoe": {}, "qwen2_moe": {}, "qwen3_moe": {}, "solar_open": {},
}  # fmt: skip
"""Kinds of experts: gated and plain, biased, transposed, interleaved, clamped."""


def model_of(family: str, options: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    given: dict[str, Any] = {**SIZES, **options, "experts_implementation": "eager"}
    config = CONFIG_MAPPING[family](**given)
    return AutoModelForCausalLM.from_config(config).float().eval()


SIGMOID = {
    *("afmoe", "deepseek_v3", "dots1", "exaone_moe", "glm4_moe", "minimax_m2", "nemotron_h"),
    "solar_open",
}
"""Families whose routers have a sigmoid; the others have a softmax."""

IDS_BS = torch.tensor([[0, 0, 0, 9, 33, 7], [5, 21, 40, 8, 3, 60]])
MASK_BS = (IDS_BS > 0).long()


def routed(family: str, seed: int = 1, **options: Any) -> Any:
    """A model with decided routers; its biases of the selection are not zero."""
    model = model_of(family, FAMILIES[family] | options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            is_router = ("gate" in name or "router" in name) and "expert" not in name
            if (is_router and tensor.ndim == 2) or "score_correction_bias" in name:
                tensor.normal_(std=0.4, generator=generator)
    return model


def record_arguments(model: Any, patch: pytest.MonkeyPatch) -> list[tuple[Tensor, Tensor]]:
    """Return a list that gets ids and weights of each call of the experts, by `grouped_mm`."""
    seen: list[tuple[Tensor, Tensor]] = []
    compute = ALL_EXPERTS_FUNCTIONS["grouped_mm"]

    def note(experts: Any, hidden: Tensor, ids_TK: Tensor, weights_TK: Tensor) -> Tensor:
        seen.append((ids_TK.clone(), weights_TK.clone()))
        return compute(experts, hidden, ids_TK, weights_TK)

    patch.setitem(ALL_EXPERTS_FUNCTIONS._global_mapping, "noting", note)
    model.set_experts_implementation("noting")
    return seen
