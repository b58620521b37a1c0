"""Tiny models of transformers with weights of which every part is seen in the logits."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from moe_ffn.data.tokenizer import BytesConfig

# All different where the architecture lets them be, so that no swapped tensor fits by chance.
SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 48,
    "attn_implementation": "eager",
    "experts_implementation": "eager",
}
EXPERTS = {"moe_intermediate_size": 24, "num_experts": 6, "num_experts_per_tok": 3}
SHARED = {**EXPERTS, "shared_expert_intermediate_size": 20}
LATENT = {
    "num_key_value_heads": 4, "kv_lora_rank": 12, "q_lora_rank": 14, "qk_nope_head_dim": 10,
    "qk_rope_head_dim": 6, "v_head_dim": 9, "moe_intermediate_size": 24, "n_routed_experts": 6,
    "num_experts_per_tok": 3, "n_group": 3, "topk_group": 2, "n_shared_experts": 2,
    "first_k_dense_replace": 1,
}  # fmt: skip
NO_GROUPS = {**LATENT, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 0}
SIGMOID = {
    "moe_intermediate_size": 24, "n_routed_experts": 6, "num_experts_per_tok": 3, "n_shared_experts": 2,
    "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
}  # fmt: skip
LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 12,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 12}
SHARPER = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.707, "beta_fast": 8, "beta_slow": 0.5}
LAYER_TYPES = ["sliding_attention", "full_attention", "sliding_attention"]
WINDOW = {"sliding_window": 7, "use_sliding_window": True}
BIASES = {"attention_bias": True, "mlp_bias": True}
GPT_OSS = {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 12, "swiglu_limit": 1.5}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "llama-tied-heads": ("llama", {"tie_word_embeddings": True, "head_dim": 12}),
    "llama-biases-gelu": ("llama", {**BIASES, "hidden_act": "gelu", "rms_norm_eps": 1e-3}),
    "qwen2": ("qwen2", {"tie_word_embeddings": True}),
    "qwen3": ("qwen3", {"head_dim": 12, "num_key_value_heads": 4}),
    "mixtral": ("mixtral", {"num_local_experts": 5, "num_experts_per_tok": 2, "head_dim": 12}),
    "olmoe": ("olmoe", EXPERTS),
    "olmoe-renormalised": ("olmoe", {**EXPERTS, "norm_topk_prob": True, "attention_bias": True}),
    "qwen2_moe": ("qwen2_moe", SHARED),
    "qwen2_moe-renormalised": (
        "qwen2_moe", {**SHARED, "norm_topk_prob": True, "decoder_sparse_step": 2, "qkv_bias": False}
    ),
    "qwen3_moe": ("qwen3_moe", {**EXPERTS, "head_dim": 12}),
    "qwen3_moe-renormalised": (
        "qwen3_moe", {**EXPERTS, "head_dim": 8, "norm_topk_prob": True, "mlp_only_layers": [1]}
    ),
    "deepseek_v3": ("deepseek_v3", LATENT),
    "deepseek_v3-direct": (
        "deepseek_v3",
        {**LATENT, "q_lora_rank": None, "norm_topk_prob": False, "routed_scaling_factor": 1.0},
    ),
    "deepseek_v3-no-groups": ("deepseek_v3", NO_GROUPS),
    "dots1": (
        "dots1", {**SIGMOID, "head_dim": 12, "num_key_value_heads": 4, "sliding_window": None}
    ),
    "dots1-biases-groups-window": (
        "dots1",
        {
            **SIGMOID, **WINDOW, "attention_bias": True, "norm_topk_prob": True, "n_group": 3,
            "topk_group": 2, "max_window_layers": 1,
        },
    ),
    "glm4_moe": ("glm4_moe", {**SIGMOID, "head_dim": 12}),
    "glm4_moe-norms-biases-groups": (
        "glm4_moe",
        {
            **SIGMOID, "use_qk_norm": True, "attention_bias": True, "norm_topk_prob": False, "n_group": 3,
            "topk_group": 2, "partial_rotary_factor": 0.25, "first_k_dense_replace": 0,
        },
    ),
    "mistral-window": ("mistral", {"sliding_window": 7, "head_dim": 12}),
    "mixtral-window": ("mixtral", {"num_local_experts": 5, "head_dim": 12, "sliding_window": 7}),
    "qwen2-later-windows": ("qwen2", {**WINDOW, "max_window_layers": 1}),
    "qwen3-chosen-windows": ("qwen3", {**WINDOW, "head_dim": 12, "layer_types": LAYER_TYPES}),
    "qwen2_moe-even-windows": ("qwen2_moe", {**SHARED, **WINDOW}),
    "qwen3_moe-window": ("qwen3_moe", {**EXPERTS, "head_dim": 12, **WINDOW}),
    "llama-linear": ("llama", {"rope_parameters": {"rope_type": "linear", "factor": 4.0}}),
    "llama-llama3": ("llama", {"rope_parameters": LLAMA3}),
    "qwen3-yarn": ("qwen3", {"head_dim": 12, "rope_parameters": YARN}),
    "mixtral-yarn": (
        "mixtral", {"head_dim": 12, "rope_parameters": {**YARN, "attention_factor": 1.5}}
    ),
    "glm4_moe-yarn": ("glm4_moe", {**SIGMOID, "rope_parameters": {**SHARPER, "truncate": False}}),
    "deepseek_v3-yarn": (
        "deepseek_v3", {**LATENT, "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0}}
    ),
    "deepseek_v3-sharper": ("deepseek_v3", {**LATENT, "rope_parameters": SHARPER}),
    "gpt_oss": (
        "gpt_oss", {**GPT_OSS, "sliding_window": 7, "rope_parameters": {**YARN, "truncate": False}}
    ),
    "gpt_oss-no-windows": (
        "gpt_oss",
        {**GPT_OSS, "layer_types": ["full_attention"] * 3, "rope_parameters": {"rope_type": "default"}},
    ),
}  # fmt: skip
IDS_BS = torch.arange(40).view(2, 20) * 7 % 97


def make(family: str, options: dict[str, Any], seed: int = 0) -> Any:
    config = CONFIG_MAPPING[family](**{**SIZES, "rope_theta": 500.0, **options})
    model = AutoModelForCausalLM.from_config(config).float().eval()
    generator = torch.Generator().manual_seed(seed)
    for name, tensor in model.state_dict().items():
        is_matrix = tensor.ndim > 1
        deviation = 1.0 if "embed" in name else 0.3 if is_matrix else 0.2
        tensor.normal_(mean=float("norm" in name), std=deviation, generator=generator)
    return model


def save(name: str, folder: Path, **options: Any) -> Any:
    """The model of `MODELS` in a folder; `options` are those of `save_pretrained`."""
    model = make(*MODELS[name])
    model.save_pretrained(folder, **options)
    return model


def logits(model: Any) -> Tensor:
    """Logits (B, S, V) of a model of transformers or of moe_ffn."""
    with torch.no_grad():
        return model(IDS_BS).logits


def save_with_bytes(
    name: str, folder: Path, edit: Callable[[Any], Any] = lambda model: None, **options: Any
) -> Path:
    """Save a model of the table, edited, with a tokenizer of bytes; return the folder."""
    family, given = MODELS[name]
    model = make(family, given | {"vocab_size": 257} | options)
    with torch.no_grad():
        edit(model)
    model.save_pretrained(folder)
    definition = BytesConfig().build(()).to_hugging_face()
    (folder / "tokenizer.json").write_text(json.dumps(definition))
    return folder


def change(folder: Path, **options: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **options}))
