"""Small models of transformers with random weights, of each family whose experts it lets others compute."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoModelForCausalLM
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
